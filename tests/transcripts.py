"""Output of programs on the pages, as it came out: ``python -m tests.transcripts`` runs the commands and writes it.

    python -m tests.transcripts --only commands refusal    # seconds
    python -m tests.transcripts --only mmdit               # the demo's whole run, with its picture: minutes
    python -m tests.transcripts --list

A block stands between two comments that name it. A block of a long run carries the hash of the presets it ran and of
the code that judges its numbers, so that ``test_transcripts.py`` knows without a run whether they have changed since;
the rest it runs again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from accel_train import cli
from accel_train.options.strict_yaml import read_yaml

ROOT = Path(__file__).parents[1]
PRESETS = ROOT / "recipes" / "presets"
HOME = "/home/me"
TINY = (
    "--max_steps 4 --schedule.warmup_steps 1 --global_batch_size 16 --micro_batch_size 16 --log.progress_bar off "
    "--checkpoints.save_every 1 --checkpoints.keep_last 9 --checkpoints.keep_state_last 3 --evaluation.every 1 "
    "--evaluation.samples 16 --evaluation.timesteps 1 --evaluation.shown 1 --evaluation.text.steps 1 "
    "--evaluation.latent.steps 1"
).split()
"""A run of four checkpoints in seconds."""
SHORT = (
    "--max_steps 60 --global_batch_size 16 --micro_batch_size 16 --log.log_every 1 --checkpoints.save_every 20 "
    "--checkpoints.keep_last 0 --evaluation.samples 32 --evaluation.timesteps 2"
).split()
"""A run of three checkpoints whose losses fall."""


Start = Callable[..., subprocess.CompletedProcess[str]]


def new_process(command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


class Folder:
    """Where a reader would stand: the repository's recipes, and no run yet.

    ``start`` runs a command to its end, as ``subprocess.run`` does; the default is a new process.
    """

    def __init__(self, path: Path, start: Start | None = None) -> None:
        self.path = path.resolve()
        self._start = start or new_process
        for name in ("recipes", "accelerate_configs"):
            (self.path / name).symlink_to(ROOT / name)

    def run(self, *words: str, code: int = 0, stream: str = "stdout") -> list[str]:
        """Lines that a recipe or ``accel-train`` prints; the folder is called /home/me in them."""
        if words[:2] == ("accel-train", "checkpoints"):
            return self.run_here(words[1:], code)
        program = ["-m", "accel_train.cli", *words[1:]] if words[0] == "accel-train" else list(words)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        done = self._start([sys.executable, *program], cwd=self.path, env=environment)
        if done.returncode != code:
            raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}")
        return self.lines(getattr(done, stream))

    def run_here(self, words: Sequence[str], code: int) -> list[str]:
        """A command that starts no process of its own: the same, without seconds of imports."""
        with chdir(self.path), redirect_stdout(StringIO()) as printed:
            found = cli._main(words)
        assert found == code, (words, found)
        return self.lines(printed.getvalue())

    def lines(self, text: str) -> list[str]:
        return text.replace(str(self.path), HOME).rstrip().splitlines()


def kept(lines: Iterable[str], *patterns: str) -> list[str]:
    """The lines that match; ``...`` for each gap."""
    found: list[str] = []
    for line in lines:
        if any(re.search(pattern, line) for pattern in patterns):
            found.append(line)
        elif found and found[-1] != "...":
            found.append("...")
    return found[:-1] if found[-1:] == ["..."] else found


def fenced(lines: Iterable[str]) -> str:
    return "\n".join(["```", *lines, "```"])


def stamp(presets: Sequence[str], code: Sequence[str] = ()) -> str:
    """Hash of what presets say, whatever their comments and order, and of files of the package, without comments."""
    content: list[Any] = [read_yaml(PRESETS / f"{name}.yaml") for name in presets]
    for name in code:
        lines = (ROOT / "accel_train" / name).read_text().splitlines()
        content.append([line for line in lines if line.strip() and not line.strip().startswith("#")])
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()[:12]


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def demo(folder: Folder, recipe: str, *flags: str) -> tuple[list[str], str]:
    """What a demo prints, shortened, and how long it took on this machine."""
    started = time.monotonic()
    lines = folder.run(f"recipes/{recipe}.py", *flags)
    took = f"{minutes(time.monotonic() - started)} on {len(os.sched_getaffinity(0))} CPU cores"
    return shortened(lines), took


def shortened(lines: Sequence[str]) -> list[str]:
    """The start, the first three and the last two log lines, and what follows them but the figures in one line."""
    steps = [index for index, line in enumerate(lines) if line.startswith("step ")]
    shown = {lines[i] for i in (*steps[:3], *steps[-2:])}
    head = r"training texts|^fresh start|^single: "
    end = [line for line in lines[steps[-1] + 1 :] if not re.match(r"evaluation|saved|metrics", line)]
    start = kept(lines[: steps[-1] + 1], head, *(f"^{re.escape(line)}$" for line in shown))
    return [*start, *end]


# ---------------------------------------------------------------------------------------------------------- blocks
def mmdit(folder: Folder) -> dict[str, str]:
    lines, took = demo(folder, "mmdit")
    run = folder.path / "runs" / "mmdit-demo"
    shutil.copyfile(run / "report" / "curves.png", ROOT / "docs" / "images" / "curves.png")
    samples = re.split(r"^## \d+\n", (run / "report" / "samples.md").read_text(), flags=re.MULTILINE)[1:3]
    return {
        "mmdit": f"{fenced(lines)}\n\nThis took {took}, seed 0.",
        "samples": "\n\n".join(text.strip() for text in samples),
    }


def seeds(folder: Folder) -> dict[str, str]:
    found: list[str] = []
    for seed in ("1", "2"):
        demo(folder, "mmdit", "--seed", seed, "--output_dir", f"runs/{seed}")
        figures = json.loads((folder.path / "runs" / seed / "report" / "evaluation.json").read_text())
        found.append(f"{figures['l2t_gain']:.1%} and {figures['t2l_cosine']:.3f}")
    return {"seeds": f"Gain of l2t and cosine of t2l of other seeds: seed 1 {found[0]}, seed 2 {found[1]}."}


def pde(folder: Folder) -> dict[str, str]:
    lines, took = demo(folder, "pde")
    return {"pde": f"{fenced(lines)}\n\nThis took {took}, generation and evaluation included."}


def compare(folder: Folder) -> dict[str, str]:
    gates = ("speedup>=1", "loss_delta<=0.03")
    words = (
        "accel-train",
        "compare",
        "recipes/mmdit.py",
        "mmdit_baseline",
        "mmdit_optimized",
        "--rounds",
        "3",
        "--gate",
    )
    lines = folder.run(*words, *gates)
    head, rows = lines.index(next(line for line in lines if line.startswith("run 1 of"))), table_of(lines)
    text = [f"$ {' '.join(words)} {' '.join(map(repr, gates))}", *lines[: head + 1], "...", ""]
    text += [*kept(rows, *(f"^{name} " for name in COMPARED)), *lines[lines.index(rows[-1]) + 1 :]]
    return {"compare": fenced(text)}


COMPARED = (
    "metric", "step_seconds", "samples_per_second", "loop_step_seconds", "loop_step_cpu_seconds", "run_seconds",
    "run_cpu_seconds", "process_rss_gib", "loss", "l2t_nll", "t2l_cosine",
)  # fmt: skip
"""Rows of the table that the page shows."""


def table_of(lines: Sequence[str]) -> list[str]:
    start = next(i for i, line in enumerate(lines) if line.startswith("metric "))
    return list(lines[start : lines.index("", start)])


def commands(folder: Folder) -> dict[str, str]:
    """What looks after checkpoints, on a run of four with a damaged one, and what a changed seed is told."""
    run, place = "runs/mmdit-demo", f"{HOME}/"
    folder.run("recipes/mmdit.py", "demo", *TINY)
    file = folder.path / run / "checkpoints" / "checkpoint_00000003" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)

    def printed(text: str, code: int = 0) -> list[str]:
        return [f"$ {text}", *(line.replace(place, "") for line in folder.run(*text.split(), code=code))]

    prune = f"accel-train checkpoints prune {run} --dry-run --keep_last 2 --keep_best 1 --best_metric l2t_nll"
    diff = printed(f"accel-train checkpoints diff {run}/checkpoints/checkpoint_00000002 {run}", code=1)
    export = f"accel-train export {run} exported --precision bf16"
    refusal = folder.run("recipes/mmdit.py", "demo", *TINY, "--seed", "3", code=2, stream="stderr")
    return {
        "ls": fenced(printed(f"accel-train checkpoints ls {run}")),
        "verify": fenced([*printed(f"accel-train checkpoints verify {run}", code=1), "", *diff]),
        "prune": fenced(printed(f"{prune} --keep_state_last 1")),
        "export": fenced(printed(export)),
        "refusal": fenced(refusal[refusal.index(next(x for x in refusal if x.startswith("error"))) :]),
        "print_config": fenced(print_config(folder)),
    }


def rerun(folder: Folder) -> dict[str, str]:
    """A window of a short demo trained again, and a branch of it."""
    run, place = "runs/mmdit-demo", f"{HOME}/"
    folder.run("recipes/mmdit.py", "demo", *SHORT)

    def printed(text: str) -> list[str]:
        return [f"$ {text}", *(line.replace(place, "") for line in folder.run(*text.split()))]

    replay = printed(f"accel-train replay {run} --steps 30:42")
    branch = printed(f"accel-train branch {run} --at 20 --optimizer.lr 5e-4")
    blame = printed(f"accel-train blame {run} --step 43 --top 4")
    forget = printed(f"accel-train forget {run} 10731 27437")
    return {"replay": fenced(replay), "branch": fenced(branch), "blame": fenced(blame), "forget": fenced(forget)}


def contract(folder: Folder) -> dict[str, str]:
    """What ``accel-train verify`` says of the scaffold, and of the scaffold with a mistake."""
    folder.run("accel-train", "init", "mine", "--scaffold")
    recipe = folder.path / "mine" / "recipe.py"
    command = "accel-train verify mine/recipe.py"
    right = folder.run(*command.split())
    text = recipe.read_text()
    weights = '(batch, batch["weight"])'
    assert text.count(weights) == 1
    recipe.write_text(text.replace(weights, "(batch, torch.tensor(float(config.micro_batch_size)))"))
    wrong = folder.run(*command.split(), code=1)
    return {"contract": fenced([f"$ {command}", *right]), "contract_fault": fenced([f"$ {command}", *wrong])}


def print_config(folder: Folder) -> list[str]:
    text = "recipes/mmdit.py base --optimizer.lr 2e-4 --print_config"
    return [f"$ python {text}", *kept(folder.run(*text.split()), "^output_dir", "^seed", r"^optimizer\.lr")]


@dataclass(frozen=True)
class Source:
    """A run and the blocks that it writes."""

    write: Callable[[Folder], dict[str, str]]
    blocks: Sequence[str]
    presets: Sequence[str] = ()
    """What a long run depends on; its blocks carry their hash."""
    code: Sequence[str] = ()
    """Files of the package that decide what the blocks say of the numbers. They are in the hash."""

    @property
    def stamp(self) -> str:
        return stamp(self.presets, self.code)


SOURCES: dict[str, Source] = {
    "mmdit": Source(mmdit, ("mmdit", "samples"), ("demo",)),
    "seeds": Source(seeds, ("seeds",), ("demo",)),
    "pde": Source(pde, ("pde",), ("pde_demo",)),
    "compare": Source(compare, ("compare",), ("mmdit_baseline", "mmdit_optimized")),
    "rerun": Source(rerun, ("replay", "branch", "blame", "forget"), ("demo",), ("rerun/paired.py",)),
    "contract": Source(
        contract,
        ("contract", "contract_fault"),
        ("../scaffold/presets/demo",),
        ("../recipes/scaffold/recipe.py", "verification/checks.py", "verification/report.py"),
    ),
    "commands": Source(commands, ("ls", "verify", "prune", "export", "refusal", "print_config")),
}
BLOCK = re.compile(r"<!-- transcript (\w+)( [0-9a-f]{12})?: (.*?) -->\n(.*?)\n<!-- end -->", re.DOTALL)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


@dataclass(frozen=True)
class Block:
    """What a page holds."""

    page: Path
    stamp: str
    text: str

    def output(self) -> list[str]:
        """Lines of its fence."""
        return self.text.partition("```\n")[2].partition("\n```")[0].splitlines()


def written() -> dict[str, Block]:
    """Every block of the pages, by name."""
    found: dict[str, Block] = {}
    for page in PAGES:
        for name, mark, _, text in BLOCK.findall(page.read_text()):
            assert name not in found, f"{page.name}: a second block {name}"
            found[name] = Block(page, mark.strip(), text)
    return found


def update(source: str, texts: dict[str, str]) -> None:
    """Put new blocks into their pages."""
    mark = f" {SOURCES[source].stamp}" if SOURCES[source].presets else ""
    for page in PAGES:
        before = page.read_text()

        def replaced(match: re.Match[str]) -> str:
            name = match[1]
            if name not in texts:
                return match[0]
            how = f"python -m tests.transcripts --only {source}"
            return f"<!-- transcript {name}{mark}: {how} -->\n{texts[name]}\n<!-- end -->"

        if (after := BLOCK.sub(replaced, before)) != before:
            page.write_text(after)


def main(argv: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--list", action="store_true", help="which run writes which blocks of which page")
    arguments = parser.parse_args(argv)
    places = written()
    for name in arguments.only:
        where = [f"{block} ({places[block].page.name})" for block in SOURCES[name].blocks]
        print(f"{name}: {', '.join(where)}", flush=True)
        if not arguments.list:
            with tempfile.TemporaryDirectory() as path:
                update(name, SOURCES[name].write(Folder(Path(path))))


if __name__ == "__main__":
    main(sys.argv[1:])
