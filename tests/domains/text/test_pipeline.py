"""Sampling from a trained model of text and latents: prompts, lengths, units, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import accel_train
from accel_train import cli
from accel_train.config import UsageError
from accel_train.domains.diffusion.latents import LatentDiffusionConfig
from accel_train.domains.diffusion.masked_text import TextDiffusionConfig
from accel_train.domains.models.mmdit import ModelConfig
from accel_train.domains.models.vae import VaeReference
from accel_train.domains.text.both_ways import EvaluationConfig
from accel_train.domains.text.encoders import TransformerEncoder
from accel_train.domains.text.latents.drawn import about_use, cut_notices
from accel_train.domains.text.modes import ModeConfig, learned_conditions
from accel_train.domains.text.pipeline import TextLatentPipeline, describe_model
from accel_train.domains.text.tokenizer import TextTokenizer
from accel_train.pipeline import read_lines
from tests import tiny_encoders
from tests.trained import TEXTS, text_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_run(tmp_path_factory.mktemp("text") / "run")


@pytest.fixture(scope="module")
def pipeline(run: Path) -> TextLatentPipeline:
    return accel_train.load(run, pipeline=TextLatentPipeline)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 1', r"config\.json: cannot be read \(it is not JSON.*restore it from a copy"),
        ('{"format": 1, "objective": {}}', r"config\.json: lacks 'sampler' of the objective or the sampler of"),
        ('{"format": 1, "objective": [], "sampler": {}}', r"config\.json: objective and sampler are required as"),
        ('{"format": 1, "objective": {"latent": []}, "sampler": {}}', r"config\.json: objective and sampler are req"),
    ],
)
def test_a_description_without_objective_and_sampler_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        TextLatentPipeline.from_directory(tmp_path)


def test_one_prompt_has_one_answer_in_any_company(pipeline: TextLatentPipeline) -> None:
    prompt = "a bird on the sea"
    alone = pipeline(prompt, seed=5)
    among = pipeline([*TEXTS[:5], prompt, *TEXTS[:3]], seed=5)
    assert among.texts is not None
    assert alone.texts is not None
    assert among.texts[5] == alone.texts[0]
    torch.testing.assert_close(among.latents[5], alone.latents[0])
    assert among.texts[0] == among.texts[6]  # the same prompt twice
    assert pipeline(prompt, seed=6).texts != alone.texts


def test_a_text_alone_is_one_text(pipeline: TextLatentPipeline) -> None:
    prompt = "a bird on the sea"
    assert pipeline.texts_from_texts(prompt) == pipeline.texts_from_texts([prompt])
    assert torch.equal(pipeline.latents_from_texts(prompt), pipeline.latents_from_texts([prompt]))
    assert torch.equal(pipeline.encode(prompt), pipeline.encode([prompt]))


def test_a_text_from_a_latent_ends_by_itself(pipeline: TextLatentPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at the length estimated from its own latent: the rest of the row is padding."""
    rows: list[torch.Tensor] = []
    decode = TextTokenizer.decode

    def keep(self: TextTokenizer, ids: torch.Tensor) -> str:
        rows.append(ids)
        return decode(self, ids)

    monkeypatch.setattr(TextTokenizer, "decode", keep)
    latents = pipeline.assets.denormalise(torch.tensor([-2.0, 0.0, 2.0])[:, None, None].expand(3, 1, 8))
    pipeline.texts_from_latents(latents)
    pad = pipeline.assets.tokenizer.pad_id
    mask = pipeline.assets.tokenizer.mask_id
    # exp(2 + 0.5 z): 2.7 tokens, of which at least the shortest of the training split, 7.4 and 20.1, at most 20
    assert [int((row != pad).sum()) for row in rows] == [3, 7, 20]
    assert not any((row == mask).any() for row in rows)
    rows.clear()
    pipeline.texts_from_latents(latents, length=11)
    assert [int((row != pad).sum()) for row in rows] == [11, 11, 11]


def test_special_tokens_around_a_text_stay_where_they_are(pipeline: TextLatentPipeline) -> None:
    class Framed:
        pad_id, mask_id = 0, 1

        def frame(self) -> tuple[list[int], list[int]]:
            return [7, 8], [9]

    class Assets:
        tokenizer = Framed()
        max_length = 8

    own = TextLatentPipeline(pipeline.model, pipeline.both, Assets(), ModeConfig())  # pyright: ignore[reportArgumentType]
    batch = own._blank(torch.tensor([5, 8]))
    assert batch["tokens"].tolist() == [[7, 8, 1, 1, 9, 0, 0, 0], [7, 8, 1, 1, 1, 1, 1, 9]]
    assert batch["maskable"].sum(1).tolist() == [2, 5]
    assert batch["text_mask"].sum(1).tolist() == [5, 8]


def test_latents_are_in_the_units_of_the_encoder(pipeline: TextLatentPipeline) -> None:
    assert pipeline.assets.encoder is not None
    raw = torch.from_numpy(pipeline.assets.encoder.encode(TEXTS[:4]))[:, None]
    torch.testing.assert_close(pipeline.encode(TEXTS[:4]), raw)
    # The pipeline normalises them as training did: the model sees what the assets give it.
    torch.testing.assert_close(pipeline.assets.normalise(raw), pipeline.assets.encode(TEXTS[:4]))
    flat = pipeline.texts_from_latents(raw[:, 0], seed=2)
    assert flat == pipeline.texts_from_latents(raw, seed=2)
    sampled = pipeline.latents_from_texts(TEXTS[:4])
    assert sampled.shape == (4, 1, 8)
    assert not torch.allclose(sampled, pipeline.assets.normalise(sampled))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda p: p(), "give one of the two"),
        (lambda p: p("a", torch.zeros(1, 1, 8)), "give one of the two"),
        (
            lambda p: p(latents=torch.zeros(2, 7)),
            r"latents of shape \(2, 7\): this model reads \(B, 1, 8\), or \(B, 8\)",
        ),
        (lambda p: p(latents=torch.zeros(0, 1, 8)), r"latents of shape \(0, 1, 8\)"),
        (lambda p: p(latents=torch.full((1, 8), float("nan"))), "NaN or infinity"),
        (lambda p: p([]), "none given"),
        (lambda p: p(3), "text 3: is of type int; a string is required"),
        (lambda p: p(["a bird", None]), "text None: is of type NoneType; a string is required"),
        (lambda p: p(latents="a bird"), "latents 'a bird': is of type str; a tensor of numbers is required"),
        (lambda p: p(latents=[1.0]), r"latents of shape \(1,\): this model reads"),
        (lambda p: p("", seed=1), "the tokenizer finds no token"),
        (lambda p: p("a bird", length=25), "length 25: 1 to 24 tokens are possible"),
    ],
)
def test_wrong_inputs_are_refused(call: Any, reason: str, pipeline: TextLatentPipeline) -> None:
    with pytest.raises(UsageError, match=reason):
        call(pipeline)


def sample(*words: str | Path) -> int:
    return cli._main(["sample", *map(str, words)])


def test_the_command_samples_what_the_pipeline_does(
    run: Path, pipeline: TextLatentPipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("stone hill\n\nwind and rain\n")
    assert sample(run, "--text", "a bird", "--text_file", file, "--seed", "4", "--output", tmp_path / "out.txt") == 0
    texts = pipeline.texts_from_texts(["a bird", "stone hill", "wind and rain"], seed=4)
    expected = [" ".join(text.split()) for text in texts]
    assert (tmp_path / "out.txt").read_text("utf-8").split("\n")[:-1] == expected
    latents = tmp_path / "z.safetensors"
    assert sample(run, "--text", "a bird", "stone", "--to", "latents", "--seed", "4", "--output", latents) == 0
    sampled = pipeline.latents_from_texts(["a bird", "stone"], seed=4)
    assert torch.equal(load_file(latents)["latents"], sampled)
    assert sample(run, "--latents", latents, "--length", "6", "--output", tmp_path / "back.txt") == 0
    back = [" ".join(text.split()) for text in pipeline.texts_from_latents(sampled, length=6)]
    assert (tmp_path / "back.txt").read_text("utf-8").split("\n")[:-1] == back


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "nothing to sample from"),
        (["--text", "a", "--latents", "z"], "starts from one of the two"),
        (["--latents", "z", "--to", "latents"], "give --text instead"),
        (["--text", "a", "--to", "latents", "--length", "3"], "length with --to latents: only sampled texts have one"),
        (["--text", "a", "--to", "latents", "--temperature", "0"], "temperature with --to latents"),
        (["--prompt", "a", "--temperature", "0"], "prompt and temperature"),
        (["--latents", "none.safetensors"], "latents none.safetensors: cannot be read"),
        (["--text_file", "none.txt"], "text_file none.txt: cannot be read"),
        (["--text_file", "/dev/null"], "text_file /dev/null: contains no line with text"),
        (["--task", "x"], "--task: unknown option"),
        (["--text", "a", "--seed", "-1"], "seed"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(words: list[str], reason: str, run: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        sample(run, *words)


def test_the_mark_of_an_encoding_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_bytes("\N{BOM}a bird\r\nstone\r\n".encode())
    assert read_lines(str(tmp_path / "texts.txt")) == ["a bird", "stone"]


def test_a_file_of_several_tensors_must_say_which(run: Path, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1, 8), "b": torch.zeros(1, 8)}, tmp_path / "z.safetensors")
    with pytest.raises(UsageError, match="contains a, b; one tensor, or one named latents, is required"):
        sample(run, "--latents", tmp_path / "z.safetensors")


@pytest.mark.parametrize(
    ("options", "learned"),
    [
        ({"mode": "l2t"}, {"latent"}),
        ({"mode": "t2l"}, {"text"}),
        ({"mode": "unconditional"}, {"text", "latent"}),  # each modality has a time of its own, which may be 0
        ({"mode": "mixed"}, {"text", "latent"}),
        ({"mode": "mixed", "weights": (0.0, 1.0, 0.0)}, {"latent"}),
        ({"mode": "sequential", "phases": ("t2l:5", "t2l:2:freeze=latent")}, {"text"}),
        ({"mode": "sequential", "phases": ("t2l:5", "l2t:2")}, {"text", "latent"}),
    ],
)
def test_a_direction_that_was_never_learned_is_refused(
    options: dict[str, Any], learned: set[str], pipeline: TextLatentPipeline
) -> None:
    config = ModeConfig(**options)
    assert learned_conditions(config) == learned
    own = TextLatentPipeline(pipeline.model, pipeline.both, pipeline.assets, modes=config)
    both = own("a bird")
    assert (both.texts is not None) == ("latent" in learned)
    assert (both.latents is not None) == ("text" in learned)
    if "latent" not in learned:
        with pytest.raises(UsageError, match=r"text from a latent \(l2t\): this model was never trained for it"):
            own.texts_from_texts(["a bird"])
    if "text" not in learned:
        with pytest.raises(UsageError, match=r"a latent from its text \(t2l\): this model was never trained for it"):
            own.latents_from_texts(["a bird"])


def test_the_card_shows_a_call_that_the_model_answers(pipeline: TextLatentPipeline) -> None:
    texts = pipeline.model.config
    pictures = ModelConfig(width=8, depth=2, heads=2).multimodal(300, 24, (1, 8), (1, 1))
    ready_made = replace(pipeline.assets, encoder=None)
    both = {"text", "latent"}
    # The usual call and task, which are those of the pipeline.
    assert about_use(texts, pipeline.assets, both, "a.txt") == {"measured_on": "held-out texts of a.txt"}
    assert about_use(texts, ready_made, both, "a")["usage"] == 'print(pipeline("A text.").latents)'
    assert about_use(texts, pipeline.assets, {"text"}, "a")["usage"] == 'print(pipeline("A text.").latents)'
    assert "pipeline(latents=latents).texts" in about_use(texts, ready_made, {"latent"}, "a")["usage"]
    assert about_use(pictures, ready_made, both, "emoji")["pipeline_tag"] == "text-to-image"
    captions = about_use(pictures, ready_made, {"latent"}, "emoji")
    assert captions["pipeline_tag"] == "image-to-text"
    assert captions["usage"] == 'print(pipeline.caption(["heart.png"]))'


def test_steps_temperature_and_guidance_are_those_asked_for(pipeline: TextLatentPipeline) -> None:
    """Each against the same settings in the evaluation of a run."""
    other = pipeline.with_sampling(steps=3, temperature=0.0, guidance=2.0)
    text = replace(pipeline.both.text, steps=3, temperature=0.0, guidance=2.0)
    latent = replace(pipeline.both.latent, steps=3, guidance=2.0)
    assert other.both == replace(pipeline.both, text=text, latent=latent)
    assert pipeline.with_sampling().both == pipeline.both


def test_the_command_line_samples_with_other_settings(
    run: Path, pipeline: TextLatentPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--steps", "2", "--temperature", "0.5", "--guidance", "1.5"]
    assert sample(run, "--text", "a bird", *flags) == 0
    asked = pipeline.with_sampling(steps=2, temperature=0.5, guidance=1.5)
    assert capsys.readouterr().out.split() == asked.texts_from_texts(["a bird"])[0].split()


def test_guidance_without_dropout_in_the_training_is_refused(pipeline: TextLatentPipeline) -> None:
    config = ModeConfig(mode="t2l", conditioning_dropout=0.0)
    own = TextLatentPipeline(pipeline.model, pipeline.both, pipeline.assets, modes=config)
    with pytest.raises(UsageError, match=r"guidance 3: .*conditioning_dropout 0 and modes.mode: t2l"):
        own.with_sampling(guidance=3.0)


def test_an_encoder_that_has_moved_is_found_where_it_is_said_to_be(
    pipeline: TextLatentPipeline, tmp_path: Path
) -> None:
    tiny_encoders.bert(tmp_path / "bert")
    encoder = TransformerEncoder(str(tmp_path / "bert"), latent_dim=8)
    encoder = replace(encoder, weights_hash=encoder.files_hash)
    own = TextLatentPipeline(pipeline.model, pipeline.both, replace(pipeline.assets, encoder=encoder), pipeline.modes)
    before = own.encode(TEXTS[:2])
    (tmp_path / "bert").rename(tmp_path / "moved")
    left = TextLatentPipeline(pipeline.model, pipeline.both, replace(own.assets, encoder=replace(encoder)), own.modes)
    with pytest.raises(UsageError, match=r"encoder '.*bert': the folder .* does not exist; .* --encoder"):
        left.encode(TEXTS[:2])
    assert torch.equal(left.with_models(encoder=str(tmp_path / "moved")).encode(TEXTS[:2]), before)
    tiny_encoders.bert(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match="its files changed since the latents were made"):
        left.with_models(encoder=str(tmp_path / "other")).encode(TEXTS[:2])


def test_a_place_for_what_the_model_does_not_use_is_refused(pipeline: TextLatentPipeline) -> None:
    with pytest.raises(UsageError, match=r"encoder 'x': this model uses no text encoder from a folder"):
        pipeline.with_models(encoder="x")
    with pytest.raises(UsageError, match="vae 'x': this model uses no autoencoder"):
        pipeline.with_models(vae="x")


def test_a_prompt_that_is_cut_says_where(pipeline: TextLatentPipeline) -> None:
    longest = pipeline.assets.max_length
    words = " ".join(["zebra"] * longest)
    (line,) = cut_notices(pipeline.assets, ["a", words])
    read = pipeline.assets.tokenizer.decode(pipeline.assets.tokenizer.tokenise([words], longest).row(0))
    assert words.startswith(read)
    assert f"cut after {read[-40:]!r}, because the model reads {longest} tokens; shorten it" in line


def test_latents_of_pictures_have_units_of_their_own(pipeline: TextLatentPipeline) -> None:
    def units(grid: tuple[int, int] | None, vae: VaeReference | None = None) -> str:
        shape = replace(pipeline.model.config, latent_grid=grid)
        assets = replace(pipeline.assets, vae=vae)
        parts = (ModeConfig(), TextDiffusionConfig(), LatentDiffusionConfig(), EvaluationConfig())
        return describe_model(shape, *parts, 0, assets, "emoji")["units"]["latents"]

    assert units(None).startswith("as the encoder gives them; ")
    assert "then channels; RGB pixels from -1 to 1; the model reads (latents - mean) / std" in units((1, 1))
    assert "latents as the autoencoder gives them" in units((1, 1), VaeReference("vae", None, "0", 4, 8, "1"))
