"""A config.json that changed between a start and its resume is refused, for whole models and adapters."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_train import cli
from accel_train.config import UsageError
from accel_train.domains.language.pretrained import ModelConfig
from accel_train.domains.language.sources import find_base
from accel_train.store import commit
from accel_train.store.pretrained_base import at_recorded_revision, refuse_other_base
from recipes import causal_lm
from tests.domains.language import tiny

pytest.importorskip("peft")
pytestmark = [
    # peft reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.usefixtures("fresh"),
]
CHECKPOINT = "checkpoint_00000002"
KINDS: dict[str, tuple[str, ...]] = {
    "whole": ("--model.source", "{base}"),
    "adapters": ("--model.source", "{base}", "--lora.rank", "2"),
    "embedded": ("--model.source", "{base}", "--lora.rank", "2", "--checkpoints.base", "embed"),
    "from scratch": ("--model.config", "{base}", "--data.tokenizer", "{base}"),
}
CHANGES: dict[str, Any] = {
    "rms_norm_eps": 1e-3,
    "hidden_act": "gelu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}


def train(folder: Path, kind: str, steps: int, name: str | None = None) -> None:
    words = [word.format(base=folder / "base") for word in KINDS[kind]]
    words += ["--output_dir", str(folder / (name or kind)), "--max_steps", str(steps)]
    assert causal_lm.main([str(folder / "tiny.yaml"), *words]) == 0


def edit(base: Path, **values: Any) -> None:
    content = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(content | values))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    tiny.save(folder / "base")
    (folder / "texts.txt").write_text("\n\n".join(f"{n} {text}" for n in range(12) for text in tiny.TEXTS))
    (folder / "tiny.yaml").write_text(
        "global_batch_size: 4\nmicro_batch_size: 4\nmax_steps: 2\nprecision: fp32\n"
        "log: {log_every: 1, progress_bar: off}\n"
        f"data: {{path: {folder / 'texts.txt'}, max_length: 32, cache_dir: {folder / 'cache'}}}\n"
        "optimizer: {lr: 1e-2}\nschedule: {kind: constant, warmup_steps: 0}\n"
        "evaluation: {samples: 2, shown: 1, max_new_tokens: 2}\ncheckpoints: {keep_last: 0}\n"
    )
    return folder


@pytest.fixture
def kind() -> str:
    """Tests that do not ask for another are of adapters."""
    return "adapters"


@pytest.fixture
def begun(folder: Path, kind: str) -> Path:
    """A run of two steps of the kind, trained once."""
    if not (folder / kind).exists():
        train(folder, kind, 2)
    return folder


@pytest.fixture
def base(begun: Path) -> Iterator[Path]:
    """The folder of the model, whose config is restored afterwards."""
    content = (begun / "base" / "config.json").read_text()
    yield begun / "base"
    (begun / "base" / "config.json").write_text(content)


def changes() -> list[Any]:
    """Each option of the config with a whole model, and one of them with adapters. Slow: the same comparison."""
    quick = {*((name, "whole") for name in CHANGES), ("rms_norm_eps", "adapters")}
    return [
        pytest.param(name, kind, marks=() if (name, kind) in quick else pytest.mark.slow)
        for name in CHANGES
        for kind in KINDS
    ]


@pytest.mark.parametrize(("name", "kind"), changes())
def test_a_changed_config_is_refused_with_both_values(name: str, kind: str, begun: Path, base: Path) -> None:
    before = json.loads((base / "config.json").read_text())[name]
    edit(base, **{name: CHANGES[name]})
    if isinstance(before, dict):
        values = r"\{.*10000.* has \{.*20000"
    else:
        values = f"{re.escape(repr(before))}.* has {re.escape(repr(CHANGES[name]))}"
    says = rf"{CHECKPOINT}: its model has {name} {values}.*; give it as it was, or start a new run"
    with pytest.raises(UsageError, match=says):
        train(begun, kind, 4)
    assert [path.name for path in (begun / kind / "checkpoints").iterdir()] == [CHECKPOINT]


@pytest.mark.parametrize("kind", ["whole", pytest.param("adapters", marks=pytest.mark.slow)])  # one comparison
def test_a_note_on_where_a_config_comes_from_may_change(kind: str, begun: Path, base: Path) -> None:
    edit(base, _name_or_path="elsewhere", transformers_version="4.0", dtype="bfloat16", architectures=["Other"])
    shutil.copytree(begun / kind, begun / f"{kind} again")
    train(begun, kind, 3, f"{kind} again")


def test_the_files_of_the_base_are_compared_with_those_recorded(begun: Path, base: Path) -> None:
    checkpoint = begun / "adapters" / "checkpoints" / CHECKPOINT
    recorded = commit.verify(checkpoint).manifest["base"]
    refuse_other_base(recorded, find_base(str(base), None).reference(), checkpoint)
    edit(base, rms_norm_eps=1e-3)
    with pytest.raises(UsageError, match=r"has another config.json"):
        refuse_other_base(recorded, find_base(str(base), None).reference(), checkpoint)


@pytest.mark.parametrize("words", [["sample", "{run}", "--text", "x"], ["export", "{run}", "{out}", "--merged"]])
def test_answers_and_merged_exports_are_of_the_same_base(
    words: list[str], begun: Path, base: Path, tmp_path: Path
) -> None:
    edit(base, rms_norm_eps=1e-3)
    with pytest.raises(UsageError, match=rf"its base is {base}, and .* has another config.json \(sha256"):
        cli._main([word.format(run=begun / "adapters", out=tmp_path / "out") for word in words])
    assert not (tmp_path / "out").exists()


def test_of_a_branch_on_the_hub_the_commit_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the cache of the Hub names it. A folder has none, also where it lies in that cache."""
    from transformers.utils import hub

    folder = tiny.save(tmp_path / "models--me--tiny" / "snapshots" / ("a" * 40))
    monkeypatch.setattr(hub, "cached_file", lambda source, name, **_: str(folder / name))
    for revision in (None, "main"):
        assert find_base("me/tiny", revision).revision == "a" * 40
    assert find_base(str(folder), None).revision is None
    # What is loaded later reads that commit, also of a branch that was named.
    recorded = find_base("me/tiny", None).reference()
    for revision in (None, "main"):
        options = ModelConfig(source="me/tiny", revision=revision)
        assert at_recorded_revision(options, recorded).revision == "a" * 40
        assert at_recorded_revision(options, None) is options
        assert at_recorded_revision(options, {**recorded, "revision": None}) is options
    for other in (ModelConfig(source="me/other", revision="main"), ModelConfig()):
        assert at_recorded_revision(other, recorded) is other


@pytest.mark.parametrize(
    ("name", "value", "trained"), [("rank", "0", "2"), ("alpha", "4", "2"), ("variant", "rslora", "lora")]
)
def test_adapters_to_start_from_have_the_scale_of_their_training(
    name: str, value: str, trained: str, begun: Path, base: Path
) -> None:
    flags = ("--model.source", str(base), "--init_from", str(begun / "adapters"), "--output_dir", str(begun / "other"))
    with pytest.raises(
        UsageError, match=rf"^--lora\.{name} {value}.* give --lora\.{name} {trained}( --lora.alpha 2)?$"
    ):
        causal_lm.main([str(begun / "tiny.yaml"), *flags, "--lora.rank", "2", f"--lora.{name}", value])


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_begins_from_exported_adapters_as_from_their_run(
    begun: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An export, or the files that peft writes, of which nothing says on which base they were trained."""
    flags = ("--model.source", str(base), "--lora.rank", "2", "--log.log_every", "1")

    def begin(name: str, place: Path) -> list[float]:
        run = begun / name
        assert (
            causal_lm.main([str(begun / "tiny.yaml"), *flags, "--init_from", str(place), "--output_dir", str(run)]) == 0
        )
        return losses(run)

    expected = begin("of_run", begun / "adapters")
    out, folder = begun / "exported", begun / "peft"
    assert cli._main(["export", str(begun / "adapters"), str(out), "--weights", "model"]) == 0
    assert begin("of_export", out) == expected
    assert "so the base is not compared" not in caplog.text
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes((out / name).read_bytes())
    assert begin("of_peft", folder) == expected
    assert "so the base is not compared" in caplog.text
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | {"alpha_pattern": {"q_proj": 7}}))
    with pytest.raises(UsageError, match=r"have another rank or alpha on q_proj, which no option here can set"):
        begin("other", folder)
    flip = bytearray((out / "adapter_model.safetensors").read_bytes())
    flip[-1] ^= 1
    (out / "adapter_model.safetensors").write_bytes(flip)
    with pytest.raises(UsageError, match=r"adapter_model\.safetensors changed since the export"):
        begin("other", out)
