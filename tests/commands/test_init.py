"""What there is to launch after an install: bundled recipes, a copy to change, a run of two steps."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from accel_train import cli
from accel_train.commands import bundled
from accel_train.commands.check import check
from accel_train.commands.launch import Launch
from accel_train.config import UsageError
from accel_train.domains.pde.checks import check_stages
from accel_train.domains.pde.operator_learning import stage_of_step
from accel_train.options.loading import load_config
from recipes import mmdit, pde
from tests import zygote
from tests.distributed.launching import ROOT, environment

PRESETS = ROOT / "recipes" / "presets"


def run(words: Sequence[str], folder: Path, **extra: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------------- init
@pytest.mark.parametrize(
    ("recipe", "presets"), [("mmdit", "demo"), ("pde", "pde_demo"), ("causal_lm", "causal_lm_demo")]
)
def test_a_copy_has_the_recipe_its_presets_and_the_launch_files(
    recipe: str, presets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my copy"
    assert cli._main(["init", str(folder), "--recipe", recipe]) == 0
    shown = capsys.readouterr().out
    assert f"accelerate launch {recipe}.py --smoke" in shown
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {f"{recipe}.py", f"presets/{presets}.yaml", "accelerate_configs/fsdp2.yaml"} <= files
    others = {"mmdit": "pde_demo", "pde": "base", "causal_lm": "demo"}[recipe]
    assert f"presets/{others}.yaml" not in files
    assert not any(" recipes/" in path.read_text() for path in folder.rglob("*") if path.is_file())


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match=r"contains mine\.txt; give a directory that does not exist or is empty"):
        cli._main(["init", str(tmp_path)])
    with pytest.raises(UsageError, match="is a file"):
        cli._main(["init", str(tmp_path / "mine.txt")])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_place_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    # Permissions would not stop root. A file holds no directory for anybody.
    (tmp_path / "file").write_text("kept")
    target = tmp_path / "file" / "mine"
    with pytest.raises(
        UsageError, match=rf"{target}: cannot be written \(Not a directory\); free space, or give a place with"
    ):
        cli._main(["init", str(target)])
    assert (tmp_path / "file").read_text() == "kept"


def test_an_unknown_recipe_is_refused_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--recipe mdit: .* there are causal_lm, lora, mmdit, pde \(did you mean 'mmdit'\?"
    ):
        cli._main(["init", str(tmp_path / "x"), "--recipe", "mdit"])
    assert not (tmp_path / "x").exists()


# ----------------------------------------------------------------------------------------------------------- by name
def test_a_bundled_recipe_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bundled.find_recipe("mmdit") == ROOT / "recipes" / "mmdit.py"
    assert "experiment: pde" in check(Launch(None, "pde"))
    (tmp_path / "mmdit").write_text("")  # a file of that name wins
    assert bundled.find_recipe("mmdit") == tmp_path / "mmdit"


def test_a_recipe_imports_the_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``python recipe.py`` does: when it is loaded, and later when its main runs."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "beside_one.py").write_text("WIDTH = 8\n")
    (tmp_path / "beside_two.py").write_text("DEPTH = 2\n")
    recipe = tmp_path / "mine.py"
    recipe.write_text("import beside_one\ndef main(argv):\n    import beside_two\n    return beside_one, beside_two\n")
    one, two = bundled.import_recipe(recipe).main([])
    assert (one.WIDTH, two.DEPTH) == (8, 2)


@pytest.mark.parametrize("command", ["launch", "check", "compare"])
def test_neither_a_file_nor_a_name_is_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = ["demo", "base"] if command == "compare" else []
    with pytest.raises(
        UsageError, match=r"recipe 'mmdt': .* a bundled one: causal_lm, lora, mmdit, pde \(did you mean 'mmdit'\?"
    ):
        cli._main([command, "mmdt", *sources])


# ------------------------------------------------------------------------------------------------------------- smoke
def test_smoke_is_a_short_run_in_a_directory_of_its_own() -> None:
    flags = ["pde_optimized", "--smoke", "--optimizer.lr", "0.5", "--max_steps", "3"]
    loaded = load_config(pde.Config, flags, presets=PRESETS)
    config = loaded.config
    assert (config.max_steps, config.global_batch_size, config.micro_batch_size) == (3, 4, 4)
    assert (config.output_dir, config.overwrite) == ("runs/pde-optimized-smoke", True)
    assert (config.schedule.kind, config.schedule.warmup_steps) == ("constant", 0)
    assert (config.optimizer.lr, loaded.origins["optimizer.lr"]) == (0.5, "command line")
    assert loaded.origins["global_batch_size"] == "--smoke"


def test_smoke_of_pde_trains_the_encoder_and_then_the_operator() -> None:
    for preset in ("pde_demo", "pde_baseline"):
        config = load_config(pde.Config, [preset, "--smoke"], presets=PRESETS).config
        stages = [stage_of_step(config.objective, step) for step in range(config.max_steps or 0)]
        assert stages == ["autoencode", "operator"]


def test_smoke_of_pde_trains_the_residual_as_well(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    preset = (PRESETS / "pde_demo.yaml").read_text()
    preset = preset.replace("objective: {", "objective: {residual_from: 800, ").replace(
        "model: {", "model: {residual_depth: 1, "
    )
    file.write_text(preset)
    config = load_config(pde.Config, [str(file), "--smoke"], presets=PRESETS).config
    stages = [stage_of_step(config.objective, step) for step in range(config.max_steps or 0)]
    assert stages == ["autoencode", "operator", "residual"]
    assert check_stages(config.objective, config.schedule, 3, 3) == []
    # A flag comes first: a trial that does not reach its stage.
    flags = ["--smoke", "--objective.residual_from", "800", "--model.residual_depth", "1"]
    config = load_config(pde.Config, ["pde_demo", *flags], presets=PRESETS).config
    assert len(check_stages(config.objective, config.schedule, 2, 2)) == 1


def test_smoke_gives_every_process_samples_and_check_says_so() -> None:
    said = check(Launch(str(ROOT / "accelerate_configs" / "ddp.yaml"), "mmdit", ("--smoke",), num_processes=3))
    assert "global batch 12 = 3 process(es) x 1 micro-batch(es) of 4" in said


def test_smoke_overwrites_no_directory_that_was_named() -> None:
    config = load_config(mmdit.Config, ["--smoke", "--output_dir", "runs/real"], presets=PRESETS).config
    assert (config.output_dir, config.overwrite) == ("runs/real", False)


@pytest.mark.parametrize(
    ("flags", "remedy", "says"),
    [
        ("--evaluate_only", "--evaluate_only false", "evaluate_only: true"),
        ("--resume must", "--resume auto", "resume: must"),
        ("--resume runs/a/checkpoints/checkpoint_00000005", "--resume never", "resume: runs/a"),
    ],
)
def test_smoke_of_a_command_that_needs_a_checkpoint_is_refused_by_its_name(
    flags: str, remedy: str, says: str, tmp_path: Path
) -> None:
    """The trial empties its directory, which was an error about an overwrite that nobody had asked for."""
    with pytest.raises(UsageError, match=rf"^--smoke with {says}.*: a trial begins at step 0 .*-smoke, where no check"):
        load_config(mmdit.Config, ["demo", "--smoke", *flags.split()], presets=PRESETS)
    load_config(mmdit.Config, ["demo", "--smoke", *remedy.split()], presets=PRESETS).config.run_options()
    named = ["demo", "--smoke", *flags.split(), "--output_dir", str(tmp_path)]
    load_config(mmdit.Config, named, presets=PRESETS).config.run_options()
    file = tmp_path / "mine.yaml"
    file.write_text((PRESETS / "demo.yaml").read_text() + "evaluate_only: true\n")
    with pytest.raises(UsageError, match=r"^--smoke with evaluate_only: true: .* give --evaluate_only false to try"):
        load_config(mmdit.Config, [str(file), "--smoke"], presets=PRESETS)


def test_smoke_pushes_and_tracks_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text((PRESETS / "demo.yaml").read_text() + "hub: {repo_id: me/model, push: last}\n")
    config = load_config(mmdit.Config, [str(file), "--smoke"], presets=PRESETS).config
    assert (config.hub.repo_id, config.log.trackers) == (None, ())


@pytest.mark.slow  # test_scaffold.py tries a recipe in two steps every day
@pytest.mark.parametrize("recipe", ["mmdit", "pde"])
def test_smoke_trains_saves_and_evaluates_and_can_be_repeated(recipe: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), "--smoke"]
    for _ in range(2):
        done = zygote.run(command, cwd=tmp_path, env=environment())
        assert done.returncode == 0, done.stdout
        assert "step 2/2" in done.stdout
        (directory,) = (tmp_path / "runs").iterdir()
        assert directory.name == f"{recipe}-demo-smoke"
        assert (directory / "checkpoints" / "checkpoint_00000002" / "manifest.json").exists()
        assert json.loads((directory / "report" / "evaluation.json").read_text())


# ------------------------------------------------------------------------------------------------------------- wheel
OUTER = """
import sysconfig
print(*dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib")), sep="\\n")
"""
MISSING = """
from importlib.metadata import requires, version
from packaging.requirements import Requirement

for text in requires("accel-train"):
    wanted = Requirement(text)
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        assert wanted.specifier.contains(version(wanted.name), prereleases=True), text
"""


def installed_wheel(folder: Path) -> Path:
    """Build the wheel, install it with pip into a virtual environment of its own, and return the environment.

    Its dependencies are those of this interpreter, so that nothing is downloaded.
    """
    run(["-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")], ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    run(["-m", "venv", "--without-pip", str(folder / "venv")], folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(run(["-c", OUTER], folder))
    python = folder / "venv" / "bin" / "python"
    run(["-m", "pip", "--python", str(python), "install", "--no-deps", "--ignore-installed", str(wheel)], folder)
    # The script of the outer environment would start the outer interpreter.
    accelerate = python.parent / "accelerate"
    accelerate.write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))} -m accelerate.commands.accelerate_cli "$@"\n')
    accelerate.chmod(0o755)
    return folder / "venv"


@pytest.mark.slow
def test_an_installed_wheel_has_everything_to_begin_with(tmp_path: Path) -> None:
    """In an empty directory: a copy of a recipe, a recipe by name, a new recipe, and completion of both."""
    pytest.importorskip("hatchling", reason="pip install -e '.[dev]'")
    environment_directory = installed_wheel(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    inside = environment() | {"PATH": f"{environment_directory / 'bin'}:{os.environ['PATH']}"}
    inside.pop("PYTHONPATH", None)

    def shell(line: str) -> str:
        done = subprocess.run(
            ["sh", "-c", line], cwd=empty, env=inside, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    place = shell('python -c "import accel_train; print(accel_train.__file__)"').strip()
    assert Path(place).is_relative_to(environment_directory)
    assert (Path(place).parent / "py.typed").exists()
    shell(f"python -c {shlex.quote(MISSING)}")
    assert "step 2/2" in shell("accel-train init demo && cd demo && accelerate launch mmdit.py --smoke")
    assert "step 2/2" in shell("accel-train launch mmdit --smoke")
    assert "step 2/2" in shell("accel-train init mine --scaffold && cd mine && accelerate launch recipe.py --smoke")
    assert "l2t_qwen" in shell("accel-train completion bash")
