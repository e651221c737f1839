"""Models of transformers and diffusers with frozen parts, buffers and tied weights: one trajectory, one checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from accel_train.store import commit, failpoints
from tests.distributed import foreign_models
from tests.distributed.foreign_models import MODELS, Kind
from tests.distributed.launching import Finished, Layout, command, fork

pytestmark = pytest.mark.distributed
RECIPE = Path(foreign_models.__file__)
STEPS = 12
KINDS: list[Kind] = ["llama", "sd3", "resnet", "gpt", "unet", "t5", "bert"]
STRATEGIES = ["single", "ddp", "fsdp2", "zero2", "zero3"]
QUICK = {("resnet", "fsdp2"), ("llama", "zero2")}
"""Statistics under sharding, and a frozen block in ZeRO's flat groups. test_causal_lm.py has a tied weight."""
RING = dict(zip(STRATEGIES, [*STRATEGIES[1:], STRATEGIES[0]], strict=True))
FLAGS = "--micro_batch_size 6 --log.log_every 1 --log.progress_bar off --checkpoints.keep_last 0".split()

Train = Callable[..., Finished]


def cases(kinds: list[Kind], strategies: list[str], quick: Collection[tuple[str, str]] = QUICK) -> list[Any]:
    found: list[Any] = []
    for kind in kinds:
        for strategy in strategies:
            marks = () if (kind, strategy) in quick else pytest.mark.slow
            found.append(pytest.param(kind, strategy, id=f"{kind}-{strategy}", marks=marks))
    return found


def train(kind: Kind, strategy: str, folder: Path, *flags: str, ok: bool = True, dies: str = "") -> Finished:
    folder.mkdir(parents=True, exist_ok=True)
    layout = Layout(strategy, 1 if strategy == "single" else 2)
    words = ["--kind", kind, "--output_dir", str(folder / "run"), *FLAGS, *flags]
    extra = {failpoints.VARIABLE: dies} if dies else {}
    done = fork(layout, command(layout, words, folder, RECIPE), **extra)  # pyright: ignore[reportArgumentType]
    assert not ok or done.returncode == 0, done.stdout[-4000:]
    return Finished(folder / "run", done.stdout, done.returncode)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    """Directory with the weights that a model of a kind starts from, made when first asked for."""
    folder = tmp_path_factory.mktemp("bases")

    def of(kind: Kind) -> Path:
        directory = folder / kind
        return directory if directory.exists() else foreign_models.save_base(kind, directory)

    return of


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, bases: Callable[[Kind], Path]) -> Callable[[Kind, str], Finished]:
    """Each model's whole run under a strategy, made when first asked for."""
    folder, made = tmp_path_factory.mktemp("runs"), dict[tuple[Kind, str], Finished]()

    def of(kind: Kind, strategy: str) -> Finished:
        key = (kind, strategy)
        if key not in made:
            every = ("--checkpoints.save_every", "6")
            made[key] = train(kind, strategy, folder / f"{kind}-{strategy}", "--base", str(bases(kind)), *every)
        return made[key]

    return of


def fixed_names(kind: Kind) -> tuple[set[str], set[str]]:
    """Names of the frozen parameters, and of the buffers of frozen modules."""
    model = MODELS[kind]()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    buffers: set[str] = set()
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.BatchNorm2d) and not any(parameter.requires_grad for parameter in own):
            buffers |= {f"{path}.{name}" for name, _ in module.named_buffers(recurse=False)}
    return frozen, buffers


@pytest.mark.parametrize(("kind", "strategy"), cases(KINDS, STRATEGIES[1:]))
def test_every_strategy_follows_the_same_trajectory(
    kind: Kind, strategy: str, runs: Callable[[Kind, str], Finished]
) -> None:
    expected, found = runs(kind, "single"), runs(kind, strategy)
    assert len(expected.losses()) == STEPS
    assert expected.losses()[-1] < expected.losses()[0]
    assert found.losses() == pytest.approx(expected.losses(), rel=1e-5)
    ours, theirs = found.tensors(STEPS, "model"), expected.tensors(STEPS, "model")
    assert ours.keys() == theirs.keys()
    buffers = {name for name, _ in MODELS[kind]().named_buffers()}
    for name in theirs.keys() - buffers:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "strategy"), cases(KINDS, STRATEGIES))
def test_a_checkpoint_holds_what_training_changes(
    kind: Kind, strategy: str, runs: Callable[[Kind, str], Finished], bases: Callable[[Kind], Path]
) -> None:
    run = runs(kind, strategy)
    path = run.checkpoint(STEPS)
    model = MODELS[kind]()
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    buffers = {name for name in model.state_dict() if name in dict(model.named_buffers())}
    assert run.tensors(STEPS, "model").keys() == trained.keys() | buffers
    assert run.tensors(STEPS, "ema").keys() == trained.keys()
    data_bytes = sum(tensor_bytes(file) for file in path.rglob("*.safetensors"))
    buffer_bytes = sum(b.numel() * b.element_size() for name, b in model.named_buffers() if name in buffers)
    # Weights, EMA and the two averages of AdamW, each in fp32, and the buffers once.
    assert data_bytes <= 4 * 4 * sum(trained.values()) * 1.01 + buffer_bytes
    base = bases(kind) / "model.safetensors"
    facts = commit.verify(path).manifest["base"]
    assert facts["files"] == {"model.safetensors": {"size": base.stat().st_size, "sha256": commit.hash_file(base)}}


def tensor_bytes(file: Path) -> int:
    with safe_open(file, framework="pt") as opened:
        tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(("kind", "strategy"), cases(["resnet", "gpt"], STRATEGIES, ()))
def test_embedded_the_base_stays_bit_for_bit(
    kind: Kind, strategy: str, bases: Callable[[Kind], Path], runs: Callable[[Kind, str], Finished], tmp_path: Path
) -> None:
    run = train(kind, strategy, tmp_path, "--base", str(bases(kind)), "--checkpoints.base", "embed")
    found, base = run.tensors(STEPS, "model"), load_file(bases(kind) / "model.safetensors")
    frozen, buffers = fixed_names(kind)
    assert frozen
    for name in frozen | buffers:
        assert torch.equal(found[name], base[name]), name
    # All of the model, as its own library loads it, and the weights are those of the run with a reference.
    missing, unexpected = MODELS[kind]().load_state_dict(found, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied to an embedding that is there
    referenced = runs(kind, strategy).tensors(STEPS, "model")
    assert all(torch.equal(found[name], tensor) for name, tensor in referenced.items())
    assert "base" not in commit.verify(run.checkpoint(STEPS)).manifest


@pytest.mark.parametrize(("kind", "strategy"), cases(KINDS, STRATEGIES, {("llama", "zero2")}))
def test_killed_and_resumed_it_has_the_same_bits(
    kind: Kind, strategy: str, runs: Callable[[Kind, str], Finished], bases: Callable[[Kind], Path], tmp_path: Path
) -> None:
    flags = ("--base", str(bases(kind)), "--checkpoints.save_every", "6")
    killed = train(kind, strategy, tmp_path, *flags, ok=False, dies="after_commit#1")
    assert killed.code != 0
    resumed = train(kind, strategy, tmp_path, *flags, "--resume", "must")
    assert "at step 6" in resumed.output
    expected = runs(kind, strategy)
    assert [x.hex() for x in resumed.losses()] == [x.hex() for x in expected.losses()]
    for stem in ("model", "ema", "optimizer/exp_avg"):
        ours, theirs = resumed.tensors(STEPS, stem), expected.tensors(STEPS, stem)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), stem


RINGS = [(kind, first, RING[first]) for kind in KINDS for first in STRATEGIES]
ALL = [("resnet", first, second) for first in STRATEGIES for second in STRATEGIES if second not in (first, RING[first])]
"""Every pair for the model with buffers and frozen parts; for the others each strategy once as writer and reader."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first", "second"), [*RINGS, *ALL])
def test_every_strategy_goes_on_from_another(
    kind: Kind,
    first: str,
    second: str,
    runs: Callable[[Kind, str], Finished],
    bases: Callable[[Kind], Path],
    tmp_path: Path,
) -> None:
    shutil.copytree(runs(kind, first).directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"checkpoint_{STEPS:08d}")
    resumed = train(kind, second, tmp_path, "--base", str(bases(kind)), "--resume", "must")
    assert "at step 6" in resumed.output
    assert resumed.losses() == pytest.approx(runs(kind, "single").losses(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_base_in_half_precision_under_fp32_masters(
    strategy: str, bases: Callable[[Kind], Path], tmp_path: Path
) -> None:
    flags = ("--base", str(bases("llama")), "--base_precision", "bf16", "--precision", "bf16")
    run = train("llama", strategy, tmp_path, *flags, "--checkpoints.base", "embed")
    assert run.losses()[-1] < run.losses()[0]
    found, base = run.tensors(STEPS, "model"), load_file(bases("llama") / "model.safetensors")
    frozen, _ = fixed_names("llama")
    for name, tensor in found.items():
        assert tensor.dtype == (torch.bfloat16 if name in frozen else torch.float32), name
        if name in frozen:
            assert torch.equal(tensor, base[name].bfloat16()), name


@pytest.mark.slow  # another base is refused by name in tests/domains/images and tests/domains/language
@pytest.mark.fault(
    "R7", injected="another base at a resume, or none", outcome="exit 2; both bases and the file are named"
)
def test_a_base_that_differs_or_is_gone_is_named(bases: Callable[[Kind], Path], tmp_path: Path) -> None:
    base = shutil.copytree(bases("gpt"), tmp_path / "base")
    flags = ("--base", str(base))
    first = train("gpt", "single", tmp_path, *flags, "--max_steps", "2")
    assert first.code == 0

    def more(*words: str) -> str:
        run = train("gpt", "single", tmp_path, "--max_steps", "3", *words, ok=False)
        assert run.code == 2, run.output[-2000:]
        return run.output

    assert "this model was built without a base; build it from that base" in more()
    foreign_models.save_base("gpt", base, change=lambda model: model.transformer.wte.weight.data.add_(1))
    assert f"and {base} has another model.safetensors (sha256 " in more(*flags)
    (base / "model.safetensors").unlink()
    with pytest.raises(Exception, match=r"model\.safetensors"):
        foreign_models.build("gpt", str(base), torch.float32)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--checkpoints.base", "reference"), "the frozen parameters of this model do not come from files; use embed"),
        (("--base_precision", "bf16"), "precision: fp32, but the frozen weights are bfloat16"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(flags: tuple[str, ...], says: str, tmp_path: Path) -> None:
    run = train("llama", "single", tmp_path, *flags, ok=False)
    assert run.code == 2
    assert says in run.output


@pytest.mark.slow  # tests/domains/language/test_adapted.py loads a base that is embedded
def test_embedded_weights_stay_embedded(bases: Callable[[Kind], Path], tmp_path: Path) -> None:
    """Nothing says that the files of a base hold what an older checkpoint embeds."""
    flags = ("--base", str(bases("gpt")), "--max_steps")
    train("gpt", "single", tmp_path, *flags, "2", "--checkpoints.base", "embed")
    refused = train("gpt", "single", tmp_path, *flags, "3", "--checkpoints.base", "reference", ok=False)
    assert refused.code == 2
    assert "contain its frozen weights" in refused.output
    train("gpt", "single", tmp_path, *flags, "3")
    path = tmp_path / "run" / "checkpoints" / "checkpoint_00000003"
    assert "base" not in commit.verify(path).manifest
    assert "transformer.h.1.mlp.c_fc.weight" in load_file(path / "model.safetensors")
