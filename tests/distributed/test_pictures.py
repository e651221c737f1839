"""Captions and pictures through the whole recipe: the same on any layout, with scores and a grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_train.domains.images.picture_scores import DISTANCES, ERRORS
from tests.distributed.launching import Layout, run_recipe
from tests.domains.images import tiny_pipelines as tiny

pytestmark = pytest.mark.distributed
PICTURES = (
    "--data.path shapes --data.max_length 40 --pictures.latents pixels --pictures.size 8 --pictures.samples 96 "
    "--model.width 32 --model.heads 2 --model.depth 1 --latent.kind flow --latent.schedule straight --latent.loss mse "
    "--times.density logit_normal --times.shift 2 --times.weighting cosmap --evaluation.latent.shift 2 "
    "--evaluation.latent.guidance 2 --evaluation.latent.steps 2 --data.vocab_size 300 --evaluation.shown 2"
).split()


@pytest.mark.parametrize("latents", ["pixels", pytest.param("vae", marks=pytest.mark.slow)])
def test_pictures_are_trained_alike_on_two_processes_and_shown(latents: str, tmp_path: Path) -> None:
    flags = (*PICTURES, "--max_steps", "6", "--data.cache_dir", str(tmp_path / "cache"))
    if latents == "vae":
        # Of one process it is in tests/domains/images/test_captioned.py.
        tiny.vae(4).save_pretrained(tmp_path / "vae")
        flags += ("--pictures.latents", "vae", "--pictures.vae", str(tmp_path / "vae"), "--pictures.patch", "2")
    one = run_recipe(Layout("single", 1), tmp_path / "one" / "run", *flags)
    two = run_recipe(Layout("ddp", 2), tmp_path / "two" / "run", *flags, "--micro_batch_size", "4")
    assert two.losses() == pytest.approx(one.losses(), rel=1e-5)
    reports = [json.loads((run.directory / "report" / "evaluation.json").read_text()) for run in (one, two)]
    for name in (*ERRORS, *DISTANCES, "caption_words", "shown_colour", "shown_position", "l2t_nll"):
        assert reports[1][name] == pytest.approx(reports[0][name], rel=1e-4, abs=1e-6), name
    for run in (one, two):
        assert "pictures of 8 x 8 pixels in 2 x 2 patches (shapes)" in run.output
        assert (run.directory / "report" / "pictures.png").stat().st_size > 0
    strips = [(run.directory / "report" / "pictures" / "00000006.png").read_bytes() for run in (one, two)]
    assert strips[0] == strips[1]
