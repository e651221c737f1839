"""What recipes/lora.py alone has, in real processes: our own MMDiT as base, and pictures of a prior.

Every layout and every resume of it is in test_invariance.py and test_resume.py, with those of the other recipes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.launching import Finished, Layout, command, fork
from tests.domains.images import test_trained_mmdit as own
from tests.domains.images import tiny_pipelines as tiny
from tests.domains.images.test_lora_recipe import pictures, settings
from tests.trained import picture_run

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = pytest.mark.distributed
TEXT = (
    *("--text_encoders.rank", "2", "--text_encoders.lr_factor", "0.5", "--max_steps", "4"),
    *("--objective.caption_dropout", "0.3", "--activation_checkpointing.mode", "full"),
    # AdamW's first steps are signs of gradients, and those of gradients near zero are chance.
    *("--evaluation.heldout_prompts", "1", "--optimizer.eps", "1e-4"),
)
IN_BF16 = [(name, ()) for name in tiny.PIPELINES] + [("sdxl", TEXT)]
WEIGHTED = ("--data.mask.source", "alpha", "--data.mask.outside", "0.5", "--data.prior.path", "{folder}/photos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    tiny.save("sd1", made / "base")
    pictures(made / "photos")
    settings(made, "sd1")
    return made


@pytest.mark.slow  # tests/domains/images/test_objective.py casts the same inputs in one process
@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
@pytest.mark.parametrize(("name", "flags"), IN_BF16, ids=[f"{name}{' text' * bool(flags)}" for name, flags in IN_BF16])
def test_bf16_without_autocast_trains_the_same(
    strategy: str, name: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    tiny.save(name, tmp_path / "base")
    pictures(tmp_path / "photos")
    settings(tmp_path, name)
    options = [*flags, "--precision", "bf16", "--max_steps", "2"]
    alone = train(Layout("single", 1, "lora"), tmp_path, "alone", *options)
    together = train(Layout(strategy, 2, "lora"), tmp_path, strategy, *options)
    assert together.losses() == pytest.approx(alone.losses(), rel=2e-2)


# Slow: tests/simulation has FSDP2 with checkpointing, tests/speed each mode, and test_invariance.py two processes.
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_within_blocks_are_sharded_and_checkpointed_selectively(precision: str, tmp_path: Path) -> None:
    """FSDP2 gathers the inner ones in the recomputation of the outer, other than in the forward."""
    tiny.save("sdxl", tmp_path / "base")
    pictures(tmp_path / "photos")
    settings(tmp_path, "sdxl")
    options = ["--precision", precision, "--max_steps", "2", "--evaluation.prompts", "a cat", "--evaluation.steps", "1"]
    kept = train(Layout("fsdp2", 2, "lora"), tmp_path, "none", *options)
    again = train(
        Layout("fsdp2", 2, "lora"), tmp_path, "selective", *options, "--activation_checkpointing.mode", "selective"
    )
    assert again.losses() == kept.losses()


def train(layout: Layout, folder: Path, name: str, *flags: str) -> Finished:
    arguments = [str(folder / "tiny.yaml"), "--output_dir", str(folder / name), *flags]
    done = fork(layout, command(layout, arguments, folder))
    assert done.returncode == 0, done.stdout[-4000:]
    return Finished(folder / name, done.stdout, done.returncode)


@pytest.mark.slow  # layouts are daily with a base of diffusers, and this base with one process
@pytest.mark.parametrize(
    ("strategy", "targets"), [("ddp", "null"), ("ddp", "all-linear"), ("fsdp2", "null"), ("fsdp2", "all-linear")]
)
def test_our_own_mmdit_trains_the_same_adapters_on_two_processes(strategy: str, targets: str, tmp_path: Path) -> None:
    """No adapter is out of reach of the loss, which DDP would refuse."""
    options = own.settings(tmp_path, picture_run(tmp_path / "base"))
    if targets != "null":
        options += ["--lora.targets", targets]
    runs: list[Finished] = []
    for layout in (Layout("single", 1, "lora"), Layout(strategy, 2, "lora")):
        run = tmp_path / f"run-{layout.processes}"
        done = fork(layout, command(layout, [*options, "--output_dir", str(run), "--micro_batch_size", "2"], tmp_path))
        assert done.returncode == 0, done.stdout[-4000:]
        runs.append(Finished(run, done.stdout, done.returncode))
    alone, together = runs
    assert together.losses() == pytest.approx(alone.losses(), rel=1e-5)
    expected = alone.tensors(4, "model")
    for key, tensor in together.tensors(4, "model").items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4)


@pytest.mark.slow  # tests/domains/images/test_weighting.py has micro-batches of the same
def test_two_processes_draw_the_same_pictures_of_the_prior(folder: Path) -> None:
    flags = [flag.format(folder=folder) for flag in WEIGHTED]
    one = train(Layout("single", 1, "lora"), folder, "one-prior", *flags)
    two = train(Layout("ddp", 2, "lora"), folder, "two-prior", *flags)
    assert two.losses() == pytest.approx(one.losses(), rel=1e-5)


@pytest.mark.slow  # tests/domains/images/test_class_pictures.py has one process
def test_two_processes_draw_the_class_together(folder: Path) -> None:
    drawn: dict[str, dict[str, bytes]] = {}
    losses: list[list[float]] = []
    for layout in (Layout("single", 1, "lora"), Layout("ddp", 2, "lora")):
        place = folder / f"class-{layout.processes}"
        asked = {"path": str(place), "caption": "a cat", "count": "5", "steps": "2"}
        flags = [word for name, value in asked.items() for word in (f"--data.prior.{name}", value)]
        run = train(layout, folder, f"drawing-{layout.processes}", *flags)
        assert "the base has drawn 5 pictures of 'a cat'" in run.output
        drawn[str(layout)] = {file.name: file.read_bytes() for file in place.iterdir()}
        losses.append(run.losses())
    alone, together = drawn.values()
    assert together == alone
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow  # tests/domains/images/test_trained_text.py has one process against torch and peft
@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_text_encoders_train_the_same_on_two_processes(name: str, tmp_path: Path) -> None:
    """XL has an encoder whose last block is not read, and DDP refuses a parameter without a gradient."""
    tiny.save(name, tmp_path / "base")
    pictures(tmp_path / "photos")
    settings(tmp_path, name)
    alone = train(Layout("single", 1, "lora"), tmp_path, "alone", *TEXT)
    expected = alone.tensors(4, "model")
    moved = {key: value.abs().max() for key, value in expected.items() if "text_encoder" in key and "lora_B" in key}
    assert min(moved.values()) > 1e-3
    runs = {"accumulated": train(Layout("single", 1, "lora"), tmp_path, "split", *TEXT, "--micro_batch_size", "1")}
    for strategy in ("ddp", "fsdp2"):
        runs[strategy] = train(Layout(strategy, 2, "lora"), tmp_path, strategy, *TEXT)
    for label, run in runs.items():
        assert run.losses() == pytest.approx(alone.losses(), rel=1e-5), label
        found = run.tensors(4, "model")
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4, msg=f"{label}, {key}")


@pytest.mark.slow  # tests/domains/images/test_lora_recipe.py has one process, and tests/speed every denoiser
@pytest.mark.parametrize("mode", ["none", "full"])
def test_offloaded_blocks_give_the_same_bits_on_two_processes(mode: str, folder: Path) -> None:
    flags = ("--max_steps", "4", "--activation_checkpointing.mode", mode)
    layout = Layout("ddp", 2, "lora")
    plain = train(layout, folder, f"plain-{mode}", *flags)
    offloaded = train(layout, folder, f"offloaded-{mode}", *flags, "--offload_frozen")
    assert "blocks in host memory" in offloaded.output
    assert offloaded.losses() == plain.losses()
    expected = plain.tensors(4, "model")
    found = offloaded.tensors(4, "model")
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    layout = Layout("fsdp2", 2, "lora")
    done = fork(
        layout,
        command(layout, [str(folder / "tiny.yaml"), "--output_dir", str(folder / "no"), "--offload_frozen"], folder),
    )
    assert done.returncode == 2
    assert "offload_frozen: fsdp2 divides or moves the weights itself" in done.stdout
