"""What a shell offers after TAB: real bash, and zsh and fish where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_train import cli
from accel_train.options.completion import SHELLS
from accel_train.options.loading import load_config
from recipes import mmdit
from tests.distributed.launching import ROOT
from tests.waiting import PATIENCE_SECONDS

PRESETS = ROOT / "recipes" / "presets"
SCAFFOLD = str(ROOT / "recipes" / "scaffold" / "recipe.py")

# Calls the registered function as readline does, with the words up to the cursor.
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
registered=$(complete -p "$1")
function=${registered##*-F }
${function%% *}
printf '%s\\n' "${COMPREPLY[@]}"
"""

COMPARED = {f"mmdit_{size}{kind}" for size in ("", "small_", "base_") for kind in ("baseline", "optimized")}
OF_MMDIT = {"base", "demo", "image_demo", "image_shapes", "l2t_qwen", *COMPARED}
OF_PDE = {"pde_baseline", "pde_demo", "pde_optimized", "pde_stack_baseline", "pde_stack_optimized"}
LINES = [
    ("accel-train la", {"launch"}),
    ("accel-train launch ", {"causal_lm", "lora", "mmdit", "pde"}),
    ("accel-train launch mmdit ", OF_MMDIT),
    ("accel-train check pde ", OF_PDE),
    ("accel-train launch --config_file x.yaml mmdit demo --optimizer.we", {"--optimizer.weight_decay"}),
    ("accel-train rehearse --config_file x.yaml pde --data.ta", {"--data.tasks"}),
    ("accel-train launch mmdit --schedule.kind c", {"constant", "cosine", "cosine_restarts"}),
    ("accel-train launch mmdit --ema.decay 0.9 --compile.no", {"--compile.no_dynamic"}),
    ("accel-train launch mmdit --help opt", {"optimizer"}),
    ("accel-train compare p", {"pde"}),
    ("accel-train repl", {"replay"}),
    ("accel-train replay --st", {"--steps"}),
    ("accel-train checkpoints pr", {"prune"}),
    ("accel-train checkpoints prune --keep_w", {"--keep_window_steps", "--keep_window_epochs"}),
    ("accel-train mon", {"monitor"}),
    ("accel-train monitor runs/a --o", {"--once"}),
    ("accel-train report --o", {"--output"}),
    ("accel-train launch mmdit --data.ta", set[str]()),  # an option of the other recipe
]


OFFERED = [pair for pair in LINES if pair[1]]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each installed shell, as `accel-train completion` prints it."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in filter(shutil.which, SHELLS):
        with pytest.MonkeyPatch.context() as patch, (folder / shell).open("w") as file:
            patch.setattr(sys, "stdout", file)
            assert cli._main(["completion", shell, SCAFFOLD]) == 0
    return folder


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def offered_by_bash(script: Path, line: str) -> set[str]:
    words = line.split(" ")
    return set(output("bash", "--norc", "-c", BASH, "bash", str(script), *words).split())


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_bash_offers(line: str, expected: set[str], scripts: Path) -> None:
    assert offered_by_bash(scripts / "bash", line) - {SCAFFOLD} == expected


def test_bash_offers_the_options_of_a_recipe_of_your_own(scripts: Path) -> None:
    assert offered_by_bash(scripts / "bash", f"accel-train launch {SCAFFOLD} demo --wid") == {"--width"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("line", "expected"), OFFERED, ids=[line for line, _ in OFFERED])
def test_fish_offers(line: str, expected: set[str], scripts: Path) -> None:
    shown = output("fish", "--no-config", "-c", f"source '{scripts / 'fish'}'; complete -C '{line}'")
    offered = {row.partition("\t")[0] for row in shown.splitlines()}
    assert expected <= offered
    recipes = {"mmdit", "pde"} if line.endswith("launch ") else set[str]()
    assert offered.isdisjoint({"mmdit", "pde", "pde_demo", "demo", "ls"} - expected - recipes)


class Terminal:
    """An interactive zsh that reads its completions from a folder."""

    def __init__(self, functions: Path) -> None:
        self._side, inner = pty.openpty()
        environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(functions)}
        self.shell = subprocess.Popen(["zsh", "-f", "-i"], stdin=inner, stdout=inner, stderr=inner, env=environment)
        os.close(inner)
        path = shlex.quote(str(functions))
        self.write(f"fpath=({path} $fpath); autoload -U compinit; compinit -u -D; echo ready$((1 + 1))\n")
        self.read_to("ready2")

    def write(self, text: str) -> None:
        os.write(self._side, text.encode())

    def read_to(self, text: str) -> None:
        """Read what the terminal shows up to ``text``. Raises ``AssertionError`` where it does not come."""
        shown = ""
        while text not in shown:
            ready, _, _ = select.select([self._side], [], [], PATIENCE_SECONDS)
            assert ready, shown
            shown += os.read(self._side, 4096).decode(errors="replace")

    def end(self) -> None:
        self.shell.kill()
        self.shell.wait()
        os.close(self._side)


@pytest.fixture(scope="module")
def terminal(scripts: Path) -> Iterator[Terminal]:
    functions = scripts / "functions"
    functions.mkdir()
    shutil.copy(scripts / "zsh", functions / "_accel-train")
    terminal = Terminal(functions)
    yield terminal
    terminal.end()


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("accel-train lau", "nch "),
        ("accel-train launch pde pde_b", "aseline "),
        ("accel-train launch --config_file x.yaml mmdit demo --optimizer.weig", "ht_decay "),
        ("accel-train check mmdit --schedule.kind ws", "d "),
        ("accel-train checkpoints pru", "ne "),
    ],
)
def test_zsh_completes(typed: str, completed: str, terminal: Terminal) -> None:
    terminal.write(typed)
    terminal.read_to(typed[-8:])  # zsh completes nothing while it has more to read
    terminal.write("\t")
    terminal.read_to(completed)
    terminal.write("\x15")  # deletes the line


def test_a_recipe_prints_its_own_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For `accelerate launch`, by its path as it was typed and by its name."""
    monkeypatch.setattr(sys, "argv", ["recipes/mmdit.py"])
    with pytest.raises(SystemExit) as left:
        load_config(mmdit.Config, ["--print_completion", "bash"], presets=PRESETS)
    assert left.value.code == 0
    script = tmp_path / "mmdit.bash"
    script.write_text(capsys.readouterr().out)
    for recipe in ("recipes/mmdit.py", "mmdit.py"):
        assert offered_by_bash(script, f"accelerate launch --num_processes 2 {recipe} ba") == {"base"}
        assert offered_by_bash(script, f"accelerate launch {recipe} base --optimizer.we") == {
            "--optimizer.weight_decay"
        }


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_script_where_the_shell_is_not_installed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(mmdit.Config, ["--print_completion", shell], presets=PRESETS)
    assert "optimizer.weight_decay" in capsys.readouterr().out


def test_an_unknown_shell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--print_completion tcsh: there are scripts for bash, zsh, fish"):
        load_config(mmdit.Config, ["--print_completion", "tcsh"], presets=PRESETS)
