"""What the pages say can be followed: links lead somewhere, tables are whole, commands are accepted."""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train import cli, load
from accel_train.cli.arguments import build_parser
from accel_train.commands.lora import LoraOptions
from accel_train.config import UsageError
from accel_train.domains.language import pretrained, row_checks
from accel_train.domains.text.latents.drawn import decoded
from accel_train.domains.text.trained_model import load_both_ways
from accel_train.metrics.records import read_metrics
from accel_train.options.loading import load_config
from recipes import causal_lm, lora, mmdit, pde
from tests import zygote
from tests.distributed.launching import Layout, environment, run_recipe
from tests.domains.language import tiny
from tests.trained import picture_run

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RECIPES: dict[str, tuple[Any, str]] = {
    "recipes/mmdit.py": (mmdit, "demo"),
    "recipes/pde.py": (pde, pde.DEFAULT_PRESET),
    "recipes/causal_lm.py": (causal_lm, causal_lm.DEFAULT_PRESET),
    "recipes/lora.py": (lora, lora.DEFAULT_PRESET),
}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SHELL = {"", "sh", "bash", "console"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def blocks(page: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The text outside fences, line by line as it stands, and each fence with its language."""
    outside: list[str] = []
    fences: list[tuple[str, list[str]]] = []
    inside = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                fences.append((line.strip().strip("`"), []))
            line = ""
        elif inside:
            fences[-1][1].append(line)
            line = ""
        outside.append(line)
    return "\n".join(outside), tuple((language, "\n".join(lines)) for language, lines in fences)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.+)$", blocks(page)[0], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    broken: list[str] = []
    for target in LINK.findall(blocks(page)[0]):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    assert not broken


@every_page
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    width, torn = 0, list[str]()
    for number, line in enumerate(blocks(page)[0].splitlines(), 1):
        cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) if line.startswith("|") else 0
        if width and cells and cells != width:
            torn.append(f"line {number}: {cells - 1} cells, not {width - 1}: {line[:60]}")
        width = cells and (width or cells)
    assert not torn


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command of our own in a fence: page, and words from the recipe or ``accel-train`` on."""
    for page in PAGES:
        for language, text in blocks(page)[1]:
            for line in text.replace("\\\n", " ").splitlines() if language in SHELL else ():
                line = line.removeprefix("$ ")
                if "..." in line or not re.match(r"(pip|accelerate|accel-train|python|torchrun|srun|[A-Z_]+=)", line):
                    continue
                for part in re.split(r"&&|\|", line):
                    words = shlex.split(part, comments=True)
                    start = next((i for i, w in enumerate(words) if w in RECIPES or w == "accel-train"), None)
                    if start is not None and "[" not in part.split("'")[0]:
                        yield page.name, words[start:]


@pytest.mark.parametrize("words", [pytest.param(w, id=f"{page}: {shlex.join(w)}") for page, w in commands()])
def test_commands_are_accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "none")
    parse_command(words)


def parse_command(words: list[str]) -> None:
    """Raise for a command of ours, from the recipe or ``accel-train`` on, that would be refused."""
    if words[0] == "accel-train":
        parsed = build_parser().parse_args(words[1:])
        if parsed.command not in ("launch", "rehearse", "check"):
            return
        words = [parsed.recipe, *parsed.arguments]
    if words[0] not in RECIPES or "--help" in words:
        return  # a recipe of the reader
    (recipe, preset), argv = RECIPES[words[0]], words[1:]
    if argv and argv[0].endswith(".yaml"):
        argv = argv[1:]  # the config of a run of the reader
    presets = ROOT / "recipes" / "presets"
    if "--print_config" in argv:
        argv.remove("--print_config")
    load_config(recipe.Config, argv, presets=presets, default_preset=preset)


def architectures() -> Iterator[list[str]]:
    """The commands of causal_lm.md that train another architecture from scratch."""
    for page, words in commands():
        if page == "causal_lm.md" and "--model.config" in words:
            yield words[1:]


@pytest.mark.parametrize("argv", [pytest.param(a, id=shlex.join(a)) for a in architectures()])
def test_architectures_of_the_page_can_be_trained(argv: list[str]) -> None:
    """They are parsed above, and a model type may refuse the sizes of the preset once it is built."""
    presets = ROOT / "recipes" / "presets"
    given = load_config(causal_lm.Config, argv, presets=presets, default_preset=causal_lm.DEFAULT_PRESET).config
    config = pretrained.resolve_config(given.model, tiny.tokenizer(), given.data.max_length)
    model = pretrained.build(given.model, config, load_source=True)
    assert config.model_type == argv[argv.index("--model.config") + 1]
    assert len(row_checks.check_rows(model, packing=given.data.packing)) == 2


@pytest.mark.distributed
def test_the_recipe_of_your_own_trains_resumes_evaluates_and_loads(tmp_path: Path) -> None:
    """The same trajectory and the same metrics on two processes, the latter for any batch size as well."""
    fences = [text for _, text in blocks(ROOT / "docs" / "recipes.md")[1]]
    script, preset = tmp_path / "train.py", tmp_path / "presets" / "default.yaml"
    script.write_text(next(text for text in fences if "(experiment.ExperimentConfig)" in text))
    preset.parent.mkdir()
    preset.write_text(next(text for text in fences if text.startswith("# presets/default.yaml")))
    launch_file = tmp_path / "two.yaml"
    launch_file.write_text("num_machines: 1\nnum_processes: 2\ndistributed_type: MULTI_GPU\n")
    rehearse = ["-m", "accel_train.cli", "rehearse", "--config_file", str(launch_file), str(script)]

    def run(*command: str) -> str:
        given = environment(PYTHONPATH=str(ROOT))
        done = zygote.run([sys.executable, *command], cwd=tmp_path, env=given, apart=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def losses(name: str, *command: str) -> list[float]:
        run(*command, "--output_dir", f"runs/{name}", "--log.log_every", "1")
        lines = [r for r in read_metrics(tmp_path / "runs" / name / "metrics.jsonl") if r["event"] == "train"]
        return [line["loss"] for line in lines]

    def evaluation(*command: str) -> dict[str, float]:
        run(*command, "--output_dir", "runs/classify", "--max_steps", "32", "--evaluate_only")
        return json.loads((tmp_path / "runs" / "classify" / "report" / "evaluation.json").read_text())

    one = losses("classify", str(script))
    assert len(one) == 30
    assert one[-1] < one[0]
    assert losses("two", *rehearse) == pytest.approx(one, rel=1e-6)
    assert len(losses("classify", str(script), "--max_steps", "32")) == 32
    metrics = json.loads((tmp_path / "runs" / "classify" / "report" / "evaluation.json").read_text())
    assert metrics["step"] == 32
    assert metrics["heldout_accuracy"] > 0.25  # five classes
    assert evaluation(*rehearse, "--micro_batch_size", "7") == pytest.approx(metrics, rel=1e-7)
    assert run("-c", next(text for text in fences if "import build_model" in text)).startswith("tensor(")


def test_the_recipe_of_your_own_is_short() -> None:
    fences = [text for _, text in blocks(ROOT / "docs" / "recipes.md")[1]]
    assert len(next(text for text in fences if "(experiment.ExperimentConfig)" in text).splitlines()) <= 90


def test_check_reads_the_recipe_of_your_own_as_a_start_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fences = [text for _, text in blocks(ROOT / "docs" / "recipes.md")[1]]
    script, preset = tmp_path / "train.py", tmp_path / "presets" / "default.yaml"
    script.write_text(next(text for text in fences if "(experiment.ExperimentConfig)" in text))
    preset.parent.mkdir()
    preset.write_text(next(text for text in fences if text.startswith("# presets/default.yaml")))
    machine = str(ROOT / "accelerate_configs" / "ddp.yaml")
    assert cli._main(["check", "--config_file", machine, str(script), "--hidden", "8"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\n  max_steps: 30 +# default\.yaml\n", shown), shown  # of the preset that main names
    assert re.search(r"\n  hidden: 8 +# command line\n", shown), shown


@pytest.mark.slow  # tests/export proves the outputs of an export
@pytest.mark.distributed
def test_a_checkpoint_and_its_export_give_the_same_samples(tmp_path: Path) -> None:
    """As the page says, from the directory alone: objective and samplers are not those of the defaults."""
    run = tmp_path / "runs" / "mmdit-demo"
    flags = ("--latent.prediction", "epsilon", "--latent.loss", "mse", "--evaluation.latent.guidance", "1.5")
    run_recipe(Layout("single", 1), run, "--max_steps", "20", "--seed", "7", *flags)
    assert cli._main(["checkpoints", "export", str(run), str(tmp_path / "exported"), "--weights", "ema"]) == 0
    both, _ = load_both_ways(tmp_path / "exported")
    assert (both.seed, both.diffusion.prediction, both.text.steps, both.latent.guidance) == (7, "epsilon", 1, 1.5)
    script = next(text for _, text in blocks(ROOT / "docs" / "recipes.md")[1] if "load_both_ways" in text)

    def printed(text: str) -> str:
        given = environment(PYTHONPATH=str(ROOT))
        done = zygote.run([sys.executable, "-c", text], cwd=tmp_path, env=given, apart=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    from_checkpoint = printed(script)
    assert "tensor(" in from_checkpoint
    assert printed(script.replace("(checkpoint.path)", '(Path("exported"))')) == from_checkpoint
    # config.json alone says how to sample.
    (tmp_path / "exported" / "experiment.json").unlink()
    assert load_both_ways(tmp_path / "exported")[0] == replace(both, model=ANY)
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    del config["objective"]["modes"]
    (tmp_path / "exported" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"config\.json: lacks 'modes' of the objective or the sampler of .*mmdit\.py"):
        load_both_ways(tmp_path / "exported")


def test_an_export_draws_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "exported"
    assert cli._main(["export", str(picture_run(tmp_path / "run")), str(out)]) == 0
    script = next(text for _, text in blocks(ROOT / "docs" / "use.md")[1] if "Image.fromarray" in text)
    monkeypatch.chdir(out)
    monkeypatch.syspath_prepend(out)
    # Put back after the test, as another export has another model.py.
    monkeypatch.setitem(sys.modules, "model", None)
    del sys.modules["model"]
    written: dict[str, Any] = {}
    exec(script, written)
    pipeline = load(out)
    batch = pipeline.assets.tokenise(written["captions"]) | {"sample": torch.arange(2), "weight": torch.ones(2)}
    batch["latent"] = torch.zeros(2, *pipeline.assets.latent_shape)
    latents = pipeline.assets.denormalise(pipeline.both.sample_latents(batch))
    for number, picture in enumerate(decoded(latents, pipeline.model.config.latent_grid, None, "cpu")):
        assert np.array_equal(np.asarray(Image.open(f"{number}.png")), picture.numpy())


@pytest.mark.slow
@pytest.mark.distributed
def test_a_checkpoint_of_the_operator_predicts_as_the_page_says(tmp_path: Path) -> None:
    run_recipe(Layout("single", 1, "pde"), tmp_path / "runs" / "pde-demo", "--max_steps", "16")
    script = next(text for _, text in blocks(ROOT / "docs" / "pde.md")[1] if "load_field_assets" in text)
    given = environment() | {"PYTHONPATH": str(ROOT)}
    done = zygote.run([sys.executable, "-c", script], cwd=tmp_path, env=given, apart=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([[[[")


def test_the_loop_of_the_readme_is_the_recipes() -> None:
    readme = (ROOT / "README.md").read_text()
    loop = readme.split("## The loop")[1].split("```python\n")[1].split("```")[0]
    assert "for batches in training:" in loop
    assert textwrap.indent(loop, " " * 4) in (ROOT / "recipes" / "causal_lm.py").read_text()


LARGE = "2 B parameters, 1024 + 154 tokens, 32 rows"
FIGURES = {
    "our loop over the raw loop": "| {:.0f} us with our fused AdamW;",
    "our loop with torch's fused AdamW, as all others have it, over the raw loop": "; {:.0f} us with torch's",
    "Lightning Fabric over the raw loop": "Lightning Fabric {:.0f}",
    "Accelerate's idiom over the raw loop": "Accelerate's idiom {:.0f}",
    "HF Trainer over the raw loop": "HF Trainer {:.0f}",
    f"{LARGE}: MFU": "MFU {:.3f}",
    f"{LARGE}: speed over the usual script on diffusers' model": "{:.2f} times the speed of",
    f"{LARGE}: speed over a strong loop on diffusers' model": "{:.2f} times that of",
}


@pytest.mark.parametrize("row", FIGURES)
def test_the_figures_of_the_readme_are_measured(row: str) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    (value,) = re.findall(rf"^\| {re.escape(row)} \| ([\d.]+)", page, re.MULTILINE)
    assert FIGURES[row].format(float(value)) in (ROOT / "README.md").read_text()


def test_every_variable_of_ours_is_in_the_table_and_no_other() -> None:
    section = (ROOT / "docs" / "config.md").read_text().split("## Environment variables")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    sources = "".join(path.read_text() for path in (ROOT / "accel_train").rglob("*.py"))
    read = set(re.findall(r"\bACCEL_TRAIN_[A-Z_]*[A-Z]\b", sources))
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == read


def test_the_options_of_accel_train_lora_are_in_its_table() -> None:
    section = (ROOT / "docs" / "lora.md").read_text().split("## In one command")[1].split("\n## ")[0]
    assert re.findall(r"^\| `--(\w+)", section, re.MULTILINE) == [field.name for field in fields(LoraOptions)]


def test_the_index_links_every_page() -> None:
    linked = {target.partition("#")[0] for target in LINK.findall((ROOT / "docs" / "index.md").read_text())}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked


def test_there_are_commands_to_try() -> None:
    assert len(list(commands())) > 40
