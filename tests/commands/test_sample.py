"""``accel-train sample``: its help, and the pipeline of a recipe of one's own."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import accel_train
from accel_train import cli
from accel_train.config import MachineError, UsageError
from accel_train.domains.models.patches import from_patches
from accel_train.domains.text.modes import ModeConfig
from accel_train.domains.text.pipeline import TextLatentPipeline
from accel_train.store import commit
from tests.trained import commit_checkpoint, language_run, picture_run, text_run

RECIPE = '''
from dataclasses import dataclass
from typing import ClassVar

from accel_train import experiment


@dataclass(frozen=True)
class Options:
    """Say a word."""

    word: str = "none"
    seed: int = 0
    device: str = "cpu"
    output: str | None = None


class Sayer:
    recipe = "sayer"
    options = Options

    @classmethod
    def from_directory(cls, directory, device):
        return cls()

    def sample(self, options):
        return [f"{options.word} {options.seed}"]


@dataclass(frozen=True)
class Config(experiment.ExperimentConfig):
    recipe: ClassVar = experiment.Recipe(%s)


def main(argv):
    raise AssertionError("nothing is trained")
'''


def test_the_pipeline_of_a_recipe_of_your_own_is_taken_from_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = {"format": 1, "pipeline": "sayer:Sayer"}
    commit_checkpoint(tmp_path / "run", torch.nn.Linear(1, 1), description, Path.mkdir)
    recipe = tmp_path / "sayer.py"
    recipe.write_text(RECIPE % "pipeline=Sayer")
    words = [str(tmp_path / "run"), "--word", "hello", "--seed", "3"]
    assert cli._main(["sample", "--recipe", str(recipe), *words]) == 0
    assert capsys.readouterr().out == "hello 3\n"
    with pytest.raises(UsageError, match=r"or give `accel-train sample` the file, with --recipe"):
        cli._main(["sample", *words])
    with pytest.raises(UsageError, match=r"--device tpu: torch has no such device on this machine; give cpu"):
        cli._main(["sample", "--recipe", str(recipe), *words, "--device", "tpu"])
    silent = tmp_path / "silent.py"
    silent.write_text(RECIPE % "")
    with pytest.raises(UsageError, match="declares no pipeline"):
        cli._main(["sample", "--recipe", str(silent), *words])


def test_its_help_lists_the_options_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = text_run(tmp_path / "run")
    with pytest.raises(SystemExit) as left:
        cli._main(["sample", str(run), "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--text_file", "--length", "--to {text,latents}", "--picture", "Sample text from texts or latents"):
        assert part in shown, part


def test_bytes_that_are_no_text_are_refused_with_their_option(tmp_path: Path) -> None:
    """Python passes bytes of the command line that are not UTF-8 on as surrogates."""
    given = b"a \xff\xfe".decode("utf-8", "surrogateescape")
    models = {
        "text": (text_run(tmp_path / "texts"), language_run(tmp_path / "language")),
        "prompt": (picture_run(tmp_path / "pictures", side=16),),
    }
    for option, runs in models.items():
        for run in runs:
            with pytest.raises(UsageError, match=rf"--{option} 'a \\udcff\\udcfe': valid UTF-8 is required"):
                cli._main(["sample", str(run), f"--{option}", "good", given])


def test_half_a_character_in_an_escape_is_refused(tmp_path: Path) -> None:
    messages = '[{"role": "user", "content": "a \\ud800"}]'
    with pytest.raises(UsageError, match=r"messages .* not JSON .*surrogates not allowed"):
        cli._main(["sample", str(language_run(tmp_path / "run")), "--messages", messages])


@pytest.mark.parametrize("to", ["latents", "text"])
def test_a_full_disk_is_an_error_of_the_output(to: str, tmp_path: Path) -> None:
    run = text_run(tmp_path / "texts")
    with pytest.raises(MachineError, match=r"--output /dev/full: cannot be written \(No space left on device\)"):
        cli._main(["sample", str(run), "--text", "a cat", "--to", to, "--output", "/dev/full"])


@pytest.mark.parametrize("place", ["cache/blob", "drawn/0.png", "drawn.png"])
def test_a_full_disk_elsewhere_is_no_error_of_the_output(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / place))

    run = text_run(tmp_path / "texts")
    monkeypatch.setattr(TextLatentPipeline, "sample", fill)
    expected = (MachineError, "--output .*drawn: cannot be written") if "drawn" in place else (OSError, "cache/blob")
    with pytest.raises(expected[0], match=expected[1]):
        cli._main(["sample", str(run), "--text", "a cat", "--output", str(tmp_path / "drawn")])


def test_the_folder_of_the_output_is_made_and_an_unusable_place_is_refused(tmp_path: Path) -> None:
    text, pictures = text_run(tmp_path / "texts"), picture_run(tmp_path / "pictures", side=16)
    latents = [str(text), "--text", "a cat", "--to", "latents"]
    texts = [str(text), "--text", "a cat", "--to", "text"]
    drawn = [str(pictures), "--prompt", "a cat"]
    (tmp_path / "file").write_text("")
    for number, words in enumerate((latents, texts, drawn)):
        place = tmp_path / "new" / f"{number}" / "written"
        assert cli._main(["sample", *words, "--output", str(place)]) == 0
        assert place.exists()
        with pytest.raises(UsageError, match=r"--output .*file/in: cannot be written \(.*\); give a place"):
            cli._main(["sample", *words, "--output", str(tmp_path / "file" / "in")])
    for words in (latents, texts):
        with pytest.raises(UsageError, match=r"cannot be written \(Is a directory\)"):
            cli._main(["sample", *words, "--output", str(tmp_path / "new")])
    with pytest.raises(UsageError, match=r"cannot be written \(File exists\)"):
        cli._main(["sample", *drawn, "--output", str(tmp_path / "file")])


def test_a_model_of_pictures_draws_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = picture_run(tmp_path / "run", side=16)
    prompts = ("a red circle", "a blue square")
    folder = tmp_path / "drawn"
    assert cli._main(["sample", str(run), "--prompt", *prompts, "--seed", "3", "--output", str(folder)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in shown] == list(prompts)
    latents = accel_train.load(run).latents_from_texts(prompts, seed=3)
    for line, expected in zip(shown, from_patches(latents, (4, 4), 4), strict=True):
        with Image.open(line.split(": ")[0]) as drawn:
            assert np.array_equal(np.asarray(drawn), expected.numpy())
    monkeypatch.chdir(tmp_path)
    assert cli._main(["sample", str(run), "--prompt", "a red circle"]) == 0
    assert len(list((tmp_path / "pictures").glob("*-0-*.png"))) == 1
    # Another model replaces no picture, the same one only its own.
    other = picture_run(tmp_path / "other", side=8)
    for again in (run, other):
        assert cli._main(["sample", str(again), "--prompt", "a red circle"]) == 0
    assert len(list((tmp_path / "pictures").glob("*-0-*.png"))) == 2
    with pytest.raises(UsageError, match=r"no text encoder; give --prompt 'a red heart'"):
        cli._main(["sample", str(run), "--text", "a red circle"])
    with pytest.raises(UsageError, match="prompt and text: a prompt is drawn as a picture"):
        cli._main(["sample", str(run), "--prompt", "a", "--text", "b"])
    with pytest.raises(UsageError, match="has learned latents of texts, not pictures; give --text"):
        cli._main(["sample", str(text_run(tmp_path / "texts")), "--prompt", "a red circle"])


def test_a_model_of_pictures_captions_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = picture_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("two  words.png", "b.jpg")):
        Image.new("RGB", (20, 12), (200, 90 * number, 30)).save(name)
    words = ["sample", str(run), "--picture", "two  words.png", "b.jpg", "--seed", "3", "--steps", "2", "--length", "5"]
    assert cli._main([*words, "--output", "said/captions.txt"]) == 0
    pipeline = accel_train.load(run, pipeline=TextLatentPipeline).with_sampling(steps=2)
    captions = [" ".join(text.split()) for text in pipeline.caption(["two  words.png", "b.jpg"], seed=3, length=5)]
    lines = [f"two  words.png: {captions[0]}", f"b.jpg: {captions[1]}"]
    assert capsys.readouterr().out.splitlines() == lines
    assert Path("said/captions.txt").read_text("utf-8").splitlines() == lines
    # A name that is no text can be read, and is printed and written with a mark in place of its bytes.
    given = b"\xff.png".decode("utf-8", "surrogateescape")
    Path("b.jpg").rename(given)
    assert cli._main(["sample", str(run), "--picture", given, "--output", "captions.txt"]) == 0
    assert capsys.readouterr().out.startswith("\N{REPLACEMENT CHARACTER}.png: ")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["--picture", "a.png", "--prompt", "b"],
            "prompt and picture: a prompt is drawn as a picture; leave the others",
        ),
        (["--picture", "a.png", "--text", "b"], "picture and text: a picture is captioned; leave the others out"),
        (["--picture", "a.png", "--text_file", "b"], "picture and text_file: a picture is captioned"),
        (
            ["--picture", "a.png", "--latents", "b", "--to", "latents"],
            "picture and latents, to: a picture is captioned",
        ),
        (["--picture", "a.png", "--picture", "b.png"], "--picture is given twice; write all its values after one"),
        (["--picture", "none.png"], r"picture none.png: cannot be read \(No such file or directory\)"),
        (["--picture", "none.png", "--encoder", "x"], "encoder 'x': this model uses no text encoder"),
        (["--text", "a"], r"no text encoder; .* or --picture heart.png to caption one"),
        ([], "nothing to sample from: .* or --picture heart.png"),
        (
            ["--prompt", "", "--guidance", "3"],
            "prompt '' and guidance 3: without a caption there is nothing for it to follow",
        ),
    ],
)
def test_the_command_refuses_pictures_beside_what_else_it_samples(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = picture_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=reason):
        cli._main(["sample", str(run), *words])


def test_an_empty_prompt_draws_without_a_caption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = picture_run(tmp_path / "run")
    words = ["sample", str(run), "--prompt", "", "a red circle", "--guidance", "3", "--seed", "2"]
    assert cli._main([*words, "--output", str(tmp_path / "drawn")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in shown] == ["no caption", "a red circle"]
    with Image.open(shown[0].split(": ")[0]) as drawn:
        expected = accel_train.load(run, pipeline=TextLatentPipeline).draw([""], seed=2)[0]
        assert drawn.tobytes() == expected.tobytes()
    always = ModeConfig(weights=(0.0, 1.0, 1.0), conditioning_dropout=0.0)
    with pytest.raises(
        UsageError, match=r"prompt '': asks for a picture without a caption, .* the model was always trained with one"
    ):
        cli._main(["sample", str(picture_run(tmp_path / "always", modes=always)), "--prompt", ""])


def test_without_a_pipeline_an_export_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, description in (("old", {"hidden": 3}), ("own", {"format": 1, "pipeline": "sayer:Sayer"})):
        commit_checkpoint(tmp_path / name, torch.nn.Linear(1, 1), description, Path.mkdir)
        assert cli._main(["export", str(tmp_path / name), str(tmp_path / f"{name}-out")]) == 0
        assert "without model.py and verify.py: config.json names" in capsys.readouterr().out
        assert json.loads((tmp_path / f"{name}-out" / "config.json").read_text()) == description
        assert not (tmp_path / f"{name}-out" / "model.py").exists()


def test_a_model_that_cannot_be_used_here_is_exported_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one whose encoder is not on this machine."""
    run = text_run(tmp_path / "run")
    directory = run / "checkpoints" / "checkpoint_00000003"
    checkpoint = commit.verify(directory)
    (directory / "assets" / "encoder.json").write_text("{}")
    changed = {"assets/encoder.json": commit.seal_file(directory / "assets" / "encoder.json")}
    commit.rewrite_manifest(directory, {"files": checkpoint.manifest["files"] | changed})
    assert cli._main(["export", str(run), str(tmp_path / "out")]) == 0
    assert "because the model cannot be used here: " in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "verify.py").exists()
