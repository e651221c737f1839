"""Trained weights know the ids of one tokenizer, and the latents of one encoder in one scale."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from accel_train.checkpoints.run import WeightsAssets
from accel_train.commands.bundled import find_recipe, import_recipe
from accel_train.config import UsageError
from accel_train.domains.models.vae import VaeReference
from accel_train.domains.text.corpus import DEMO_FILE
from accel_train.domains.text.dataset import PreparedData
from accel_train.domains.text.encoders import LatentEncoder
from accel_train.domains.text.options import DataConfig
from accel_train.domains.text.prepare import prepare_data
from accel_train.domains.text.tokenizer import train_tokenizer
from tests import tiny_encoders

LINES = DEMO_FILE.read_text().splitlines()


class Pictures(NamedTuple):
    vae: VaeReference | None
    split_keys: Mapping[str, int] = {}


PICTURES = Pictures(VaeReference("vae", None, "a" * 64, 4, 8, "b" * 64))


def settings(folder: Path, **options: object) -> DataConfig:
    for name, lines in (("one", LINES[:300]), ("two", LINES[3000:3400])):
        (folder / f"{name}.txt").write_text("\n".join(lines))
    base = DataConfig(
        path=str(folder / "one.txt"),
        cache_dir=str(folder / "cache"),
        vocab_size=340,
        latent_dim=8,
        max_length=16,
        heldout_fraction=0.1,
    )
    return replace(base, **options)  # type: ignore[arg-type]


def trained(folder: Path, config: DataConfig, *, resumes: bool = True, pictures: Pictures | None = None) -> Any:
    """Return the data of a config, and the assets that its checkpoint has."""
    data = prepare_data(config, pictures=pictures)
    shutil.rmtree(folder / "source", ignore_errors=True)
    data.assets.save(folder / "source" / "assets")
    options = {f"data.{name}": value for name, value in asdict(config).items()}
    (folder / "source" / "experiment.json").write_text(json.dumps({"options": options}))
    return data, WeightsAssets(folder / "source" / "assets", resumes)


def identity(encoder: LatentEncoder | None) -> str:
    assert encoder is not None
    return encoder.identity


def same_assets(one: PreparedData, two: PreparedData) -> list[bool]:
    """Compare tokenizer, encoder and scale."""
    return [
        one.tokenizer.to_json() == two.tokenizer.to_json(),
        identity(one.assets.encoder) == identity(two.assets.encoder),
        torch.equal(one.latent_mean, two.latent_mean) and one.latent_std == two.latent_std,
    ]


def lengths(data: PreparedData) -> list[float]:
    """The parameters of the estimate."""
    return [*data.assets.length.weights.flatten().tolist(), float(data.assets.length.bias)]


# --------------------------------------------------------------------------------------------------------------- resume
def test_a_resume_with_other_data_keeps_what_the_weights_were_trained_with(tmp_path: Path) -> None:
    """Whether or not data.changed allows them: --allow may take them too."""
    config = settings(tmp_path)
    first, weights = trained(tmp_path, config)
    again = prepare_data(config, weights=weights)
    assert (again.fingerprint, again.notices) == (first.fingerprint, first.notices)
    other = prepare_data(replace(config, path=str(tmp_path / "two.txt")), weights=weights)
    assert same_assets(first, other) == [True, True, True]
    assert lengths(other) == lengths(first)
    assert other.fingerprint != first.fingerprint
    alone = prepare_data(replace(config, path=str(tmp_path / "two.txt")))
    assert same_assets(first, alone) == [False, False, False]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"vocab_size": 350},
            r"--data\.vocab_size 350: 340 in .*source, .* whatever --allow .*\. Give .*size 340, or",
        ),
        ({"latent_dim": 4}, r"--data\.latent_dim 4: 8 in .*source, and the latent encoder .* is kept"),
        ({"normalise": False}, r"--data\.normalise False: True in .*source"),
    ],
)
def test_options_of_other_assets_are_refused_for_a_resume(
    options: dict[str, object], says: str, tmp_path: Path
) -> None:
    _, weights = trained(tmp_path, settings(tmp_path))
    with pytest.raises(UsageError, match=says):
        prepare_data(settings(tmp_path, **options), weights=weights)


def test_another_encoder_is_refused_for_a_resume(tmp_path: Path) -> None:
    tiny_encoders.bert(tmp_path / "bert")
    neural = settings(tmp_path, encoder=str(tmp_path / "bert"))
    first, weights = trained(tmp_path, neural)
    assert same_assets(first, prepare_data(neural, weights=weights)) == [True, True, True]
    with pytest.raises(UsageError, match=r"--data\.encoder tfidf-svd: .*bert in .*source, and the latent encoder"):
        prepare_data(settings(tmp_path), weights=weights)
    with pytest.raises(UsageError, match=r"--data\.encoder '.*bert': .* were trained on latents of another encoder"):
        prepare_data(replace(neural, pooling="cls"), weights=weights)
    # The same files elsewhere are the same encoder.
    shutil.move(tmp_path / "bert", tmp_path / "moved")
    moved = prepare_data(replace(neural, encoder=str(tmp_path / "moved")), weights=weights)
    assert moved.fingerprint == first.fingerprint


def test_pictures_of_another_autoencoder_are_refused_for_a_resume(tmp_path: Path) -> None:
    config = settings(tmp_path, latents=str(ready_made(tmp_path)), path=str(tmp_path / "rows.jsonl"), latent_dim=None)
    _, weights = trained(tmp_path, config, pictures=PICTURES)
    prepare_data(config, weights=weights, pictures=PICTURES)
    assert PICTURES.vae is not None
    other = Pictures(replace(PICTURES.vae, sha256="b" * 64))
    with pytest.raises(UsageError, match=r"--pictures\.vae 'vae': .* latents of another encoder .*whatever --allow"):
        prepare_data(config, weights=weights, pictures=other)


def ready_made(folder: Path, scale: float = 1.0) -> Path:
    """Write latents of 60 rows, and the rows."""
    import numpy as np

    (folder / "latents").mkdir(exist_ok=True)
    values = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    np.save(folder / "latents" / "shard_0000.npy", scale * values)
    rows = [json.dumps({"text": LINES[number], "shard": 0, "idx": number}) for number in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "latents"


# ------------------------------------------------------------------------------------------------------------ init_from
def test_a_new_run_takes_the_assets_of_its_weights_and_says_so(tmp_path: Path) -> None:
    first, weights = trained(tmp_path, settings(tmp_path), resumes=False)
    # Left at their defaults, 2048 pieces and 64 dimensions, the options ask for nothing.
    for options in ({}, {"vocab_size": 2048, "latent_dim": None}):
        new = prepare_data(settings(tmp_path, path=str(tmp_path / "two.txt"), **options), weights=weights)
        assert same_assets(first, new) == [True, True, True]
        taken, scale = new.notices[-2:]
        assert taken.startswith("init_from: uses the tokenizer of 340 pieces and the latent encoder of ")
        assert scale.endswith("of these latents alone)")
        assert lengths(new) != lengths(first), "the texts are others"
    # The new run resumes with what it has taken, which is its own by now.
    new.assets.save(tmp_path / "new" / "assets")
    own = WeightsAssets(tmp_path / "new" / "assets", resumes=True)
    assert prepare_data(settings(tmp_path, path=str(tmp_path / "two.txt")), weights=own).fingerprint == new.fingerprint


def test_a_new_run_is_refused_other_sizes_and_pieces_than_its_weights_know(tmp_path: Path) -> None:
    _, weights = trained(tmp_path, settings(tmp_path), resumes=False)
    with pytest.raises(UsageError, match=r"--data\.vocab_size 350: 340 in .*, or leave the option out .* --init_from"):
        prepare_data(settings(tmp_path, vocab_size=350), weights=weights)
    from transformers import PreTrainedTokenizerFast

    def save(name: str, lines: list[str]) -> str:
        text = train_tokenizer(lines, 340).to_json()
        (tmp_path / f"{name}.json").write_text(text)
        made = PreTrainedTokenizerFast(
            tokenizer_file=str(tmp_path / f"{name}.json"), pad_token="[PAD]", mask_token="[MASK]"
        )
        made.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    named = replace(settings(tmp_path), vocab_size=2048)
    other = save("other", LINES[3000:3400])
    with pytest.raises(UsageError, match=r"--data\.tokenizer '.*other': .* know 340 pieces .*, and \d+ of them have"):
        prepare_data(replace(named, tokenizer=other), weights=weights)
    # The same pieces under another name.
    assets = str(weights.folder)
    assert prepare_data(replace(named, tokenizer=assets), weights=weights).tokenizer.vocab_size == 340


def test_weights_without_the_options_of_their_run_are_known_by_their_assets(tmp_path: Path) -> None:
    _, weights = trained(tmp_path, settings(tmp_path), resumes=False)
    (weights.folder.parent / "experiment.json").write_text('{"options": {}}')
    assert prepare_data(settings(tmp_path), weights=weights).tokenizer.vocab_size == 340
    for options, says in (
        ({"vocab_size": 350}, r"--data\.vocab_size 350: 340 in .*source"),
        ({"latent_dim": 4}, r"--data\.latent_dim 4: 8 in .*source"),
        ({"normalise": False}, r"--data\.normalise False: True in .*source"),
    ):
        with pytest.raises(UsageError, match=says):
            prepare_data(settings(tmp_path, **options), weights=weights)


def test_a_host_without_the_checkpoint_meets_the_others_as_often(tmp_path: Path) -> None:
    """Or it would wait for them for ever, in place of being refused."""
    config = settings(tmp_path)
    _, weights = trained(tmp_path, config)
    met: list[int] = []
    for seen in (weights, None):
        calls: list[None] = []
        prepare_data(config, world_size=1, barrier=lambda: calls.append(None), weights=seen)  # noqa: B023
        met.append(len(calls))
    assert met[0] == met[1] > 0


def test_another_encoder_than_that_of_the_weights_is_asked_what_it_declares(tmp_path: Path) -> None:
    _, weights = trained(tmp_path, settings(tmp_path), resumes=False)
    tiny_encoders.bert(tmp_path / "bert")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "bert" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UsageError, match="Dense"):
        prepare_data(settings(tmp_path, encoder=str(tmp_path / "bert")), weights=weights)


def test_a_new_run_with_another_encoder_has_a_scale_of_its_own_and_says_so(tmp_path: Path) -> None:
    first, weights = trained(tmp_path, settings(tmp_path), resumes=False)
    tiny_encoders.bert(tmp_path / "bert")
    new = prepare_data(settings(tmp_path, encoder=str(tmp_path / "bert")), weights=weights)
    assert same_assets(first, new) == [True, False, False]
    assert "were trained on latents of another encoder; mean and std are those of these latents" in new.notices[-1]


def test_ready_made_latents_are_taken_to_be_of_the_encoder_of_the_weights(tmp_path: Path) -> None:
    config = settings(tmp_path, latents=str(ready_made(tmp_path)), path=str(tmp_path / "rows.jsonl"), latent_dim=None)
    first, weights = trained(tmp_path, config, resumes=False)
    ready_made(tmp_path, scale=2.0)
    new = prepare_data(config, weights=weights)
    assert (new.latent_std, torch.equal(new.latent_mean, first.latent_mean)) == (first.latent_std, True)
    assert f"std {first.latent_std:.4g} ({2 * first.latent_std:.4g} of these latents alone)" in new.notices[-1]


# ------------------------------------------------------------------------------------------------------------- recipe
@pytest.mark.usefixtures("fresh")
def test_the_recipe_evaluates_and_begins_with_the_assets_of_the_weights(tmp_path: Path) -> None:
    settings(tmp_path)
    recipe: Any = import_recipe(find_recipe("mmdit"))
    words = (
        "--model.size demo --model.width 32 --model.depth 1 --model.heads 2 --data.vocab_size 340 --data.latent_dim 8 "
        "--data.max_length 16 --global_batch_size 8 --micro_batch_size 8 --schedule.kind constant "
        "--schedule.warmup_steps 0 --evaluation.samples 8 --evaluation.timesteps 1 --evaluation.text.steps 2 "
        f"--evaluation.latent.steps 2 --log.progress_bar off --data.cache_dir {tmp_path}/cache"
    )

    def start(run: str, path: str, *more: str, steps: int = 1) -> Path:
        places = ["--output_dir", str(tmp_path / run), "--data.path", str(tmp_path / path)]
        assert recipe.main([*words.split(), *places, "--max_steps", str(steps), *more]) == 0
        return tmp_path / run / "checkpoints" / f"checkpoint_{steps:08d}" / "assets"

    def measured() -> dict[str, Any]:
        return json.loads((tmp_path / "run" / "report" / "other_data" / "evaluation.json").read_text())

    first = start("run", "one.txt")
    other = ("--evaluate_only", "--data.heldout_path", str(tmp_path / "two.txt"))
    with pytest.raises(
        UsageError, match=r"(?s)data_fingerprint.* by --data\.changed allow --allow data\.heldout_path: "
    ):
        start("run", "one.txt", *other)
    start("run", "one.txt", *other, "--data.changed", "allow", "--allow", "data.heldout_path")
    recorded = measured()
    assert recorded["measured_on"].keys() == {"data.heldout_path", "data_fingerprint"}
    assert (tmp_path / "run" / "report" / "other_data" / "samples.md").exists()
    of_the_run = json.loads((tmp_path / "run" / "report" / "evaluation.json").read_text())
    assert of_the_run["l2t_nll"] != recorded["l2t_nll"]
    start("run", "one.txt", *other, "--allow", "data.heldout_path", "data_fingerprint")
    assert measured() == recorded
    new = start("new", "two.txt", "--init_from", str(tmp_path / "run"))
    resumed = start("new", "two.txt", "--init_from", str(tmp_path / "run"), steps=2)
    for name in ("tokenizer.json", "encoder.safetensors", "latent.safetensors"):
        contents = {(folder / name).read_bytes() for folder in (first, new, resumed)}
        assert len(contents) == 1, name
