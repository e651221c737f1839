"""``accel-train checkpoints``: each command on real files, compared with the tensors themselves."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from accel_train import cli
from accel_train.checkpoints import fetch
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.cli.arguments import build_parser
from accel_train.commands import diff as compare
from accel_train.commands import places
from accel_train.config import UsageError
from accel_train.domains.models.mmdit import MMDiTConfig, ModelConfig, MultimodalMMDiT, MultimodalMMDiTConfig
from accel_train.hub.queue import Entry, HubQueue
from accel_train.options.tree import to_tree
from accel_train.store import atomic_files, commit, lock, manifest, planning, strict_json, weights
from accel_train.store.names import LOCK_FILE
from accel_train.store.run_file import write_run
from tests.store.test_commit import unreadable
from tests.store.test_weights import plant, read_weights
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
TINY = MultimodalMMDiTConfig(MMDiTConfig(width=16, depth=1, heads=2), 11, 3, 5, 2)


def call(*arguments: str | Path) -> int:
    return cli._main(["checkpoints", *map(str, arguments)])


def model_of(seed: int, config: MultimodalMMDiTConfig = TINY) -> MultimodalMMDiT:
    torch.manual_seed(seed)
    model = MultimodalMMDiT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    return model


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def checkpoint(
    run: Path,
    step: int,
    model: MultimodalMMDiT | None = None,
    *,
    precision: torch.dtype = torch.float32,
    ema: Mapping[str, Tensor] | None = None,
    **more: Any,
) -> Path:
    """Written as training does: the weights, an average, two states, exact copies where ``precision`` is lower."""
    model = model or model_of(step)
    exact = values_of(model)
    average = ema or {name: value * 0.5 for name, value in exact.items()}
    temporary = run / "checkpoints" / commit.temporary_name(step, atomic_files.new_nonce())
    (temporary / "optimizer").mkdir(parents=True)
    (temporary / "assets").mkdir()
    collections = {
        "model": {name: value.to(precision) for name, value in exact.items()},
        "ema": {name: value.to(precision) for name, value in average.items()},
        "optimizer/exp_avg": {name: value * 0.1 for name, value in exact.items()},
        "optimizer/exp_avg_sq": {name: value**2 for name, value in exact.items()},
    }
    if precision != torch.float32:
        collections |= {"optimizer/master": exact, "optimizer/master_ema": dict(average)}
    for stem, values in collections.items():
        save_file({name: value.contiguous() for name, value in values.items()}, temporary / f"{stem}.safetensors")
    keys = [stem.removeprefix("optimizer/") for stem in collections if "/" in stem]
    state = {key: dict.fromkeys(exact, f"optimizer/{key}.safetensors") for key in keys}
    texts = {"optimizer/index.json": {"step": step, "state": state}, "trainer_state.json": {"step": step}}
    texts |= {"config.json": to_tree(model.config), "assets/tokenizer.json": {"vocabulary": ["a"]}}
    texts |= {"generation_config.json": {"eos_token_id": 1}}
    for name, value in texts.items():
        (temporary / name).write_text(json.dumps(value))
    files = {
        path.relative_to(temporary).as_posix(): commit.seal_file(path)
        for path in sorted(temporary.rglob("*"))
        if path.is_file()
    }
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 7200))
    facts = {"run_id": "abc", "step": step, "epoch": step / 10, "state": True, "written_at": written}
    final = run / "checkpoints" / commit.checkpoint_name(step)
    commit.commit(temporary, final, facts | {"metrics": {"loss": 1 / step}} | more | {"files": files})
    return final


def name(step: int) -> str:
    return commit.checkpoint_name(step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints, with the config.yaml of a run that keeps two."""
    run = tmp_path / "run"
    for step in (10, 20, 30):
        checkpoint(run, step)
    write_run(run, {"run_id": "abc"})
    (run / "config.yaml").write_text("seed: 0\ncheckpoints: {keep_last: 2, pinned: []}\n")
    return run


def flip_bit(path: Path) -> None:
    """One bit in the middle, and the times of before."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(stat.st_size // 2)
        byte = file.read(1)[0]
        file.seek(stat.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def steps_in(run: Path) -> list[int]:
    return [step for step, _ in manifest.committed(run / "checkpoints")]


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


# ---------------------------------------------------------------------------------------------------------------- ls
def test_ls_says_what_is_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(run / "checkpoints" / name(20) / "model.safetensors")
    queue = HubQueue(run)
    entry = Entry(name(10), 10, "abc", "org/model")
    queue.add(entry)
    queue.done(entry, {"url": "https://hub/org/model/commit/1", "revision": "step-00000010"})
    queue.add(Entry(name(30), 30, "abc", "org/model"))
    assert call("ls", run) == 0
    header, *rows, reason, total = lines_of(capsys)
    assert header.split() == ["name", "step", "age", "size", "loss", "state", "verified", "pushed"]
    cells = [row.split() for row in rows]
    assert [row[:2] for row in cells] == [[name(step), str(step)] for step in (10, 20, 30)]
    assert [row[2:4] for row in cells] == [["2.0", "h"]] * 3
    assert [row[-4] for row in cells] == ["0.1", "0.05", "0.033333"]
    assert [row[-3:] for row in cells] == [
        ["yes", "yes", "org/model@step-00000010"],
        ["yes", "NO", "-"],
        ["yes", "yes", "queued"],
    ]
    assert reason == f"{name(20)}: model.safetensors has changed since it was written (sha256 differs)"
    assert total.startswith("3 checkpoint(s), ")


def test_ls_as_json_and_of_other_places(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / name(30) / "manifest.json").unlink()
    HubQueue(run).fail(Entry(name(20), 20, "abc", "org/model"), "403")
    for place in (run, run / "checkpoints"):
        assert call("ls", place, "--json") == 0
        ten, twenty, thirty = json.loads(capsys.readouterr().out)
        assert (ten["name"], ten["step"], ten["verified"], ten["reason"]) == (name(10), 10, True, None)
        assert ten["metrics"] == {"loss": 0.1}
        assert 7190 < ten["age_seconds"] < 10_000
        assert ten["size_bytes"] == sum(p.stat().st_size for p in Path(ten["path"]).rglob("*") if p.is_file())
        assert twenty["pushed"] == "failed: 403"
        assert (thirty["step"], thirty["verified"], thirty["state"]) == (30, False, None)
        assert "no manifest.json" in thirty["reason"]
    assert call("ls", run / "checkpoints" / name(20), "--json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [name(20)]


def test_a_quick_ls_looks_at_sizes_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(run / "checkpoints" / name(10) / "model.safetensors")
    (run / "checkpoints" / name(20) / "config.json").write_text("{}")
    (run / "checkpoints" / name(30) / "ema.safetensors").unlink()
    call("ls", run, "--quick")
    _, *rows, twenty, thirty, _ = lines_of(capsys)
    assert [" sizes only " in row for row in rows] == [True, False, False]
    assert twenty.startswith(f"{name(20)}: config.json has 2 bytes")
    assert thirty == f"{name(30)}: ema.safetensors is missing"


def test_ls_shows_the_metric_that_the_run_goes_by(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(run, 40, metrics={"loss": 3.0, "accuracy": 0.25})
    call("ls", run)
    assert " loss " in lines_of(capsys)[0]
    (run / "config.yaml").write_text("checkpoints: {best_metric: accuracy}\n")
    call("ls", run)
    lines = lines_of(capsys)
    assert " accuracy " in lines[0]
    assert "0.25" in lines[4]
    (run / "config.yaml").write_text("checkpoints: {best_metric: [")
    assert call("ls", run) == 0


@pytest.mark.parametrize(("mode", "best"), [("min", 20), ("max", 10)])
def test_the_best_checkpoint_is_marked_and_has_a_name(
    mode: str, best: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # Of equal ones the first, as early stopping counts.
    for step, value in ((10, 0.9), (20, 0.1), (30, 0.5), (31, 0.1), (32, 0.9)):
        checkpoint(run, step, metrics={"nll": value})
    checkpoint(run, 40, metrics={"other": 0.0})
    (run / "config.yaml").write_text(f"checkpoints: {{best_metric: nll, best_mode: {mode}}}\n")
    call("ls", run)
    marked = [line for line in lines_of(capsys) if " best" in line]
    assert [line.split()[0] for line in marked] == [name(best)]
    assert places.find_place(f"{run}@best").checkpoints == (run / "checkpoints" / name(best),)
    assert places.newest_at(f"{run}@best")[0].step == best
    assert places.newest_at(f"{run}@30")[0].step == 30
    with pytest.raises(
        UsageError, match=r"run@7: there is no checkpoint of this step; there are 10, 20, 30, 31, 32, 40"
    ):
        places.newest_at(f"{run}@7")
    assert fetch.find_weights(f"{run}@best")[0] == run / "checkpoints" / name(best)
    assert fetch.find_weights(f"{run}@30")[0] == run / "checkpoints" / name(30)
    with pytest.raises(UsageError, match=r"run@7: there is no checkpoint of this step"):
        fetch.find_weights(f"{run}@7")


def test_a_checkpoint_chosen_by_its_step_is_compared_and_is_nothing_to_convert(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call("diff", f"{run}@10", f"{run}@10")
    lines = lines_of(capsys)
    assert lines[0] == f"A: {run / 'checkpoints' / name(10)} (step 10)"
    assert lines[-1] == "equal"
    with pytest.raises(UsageError, match=rf"{name(10)}: is already accel_train's own"):
        call("convert", f"{run}@10", tmp_path / "converted")


def test_a_run_without_a_metric_to_go_by_has_no_best(run: Path) -> None:
    steps = r"name a step, as in .*run@30; there are 10, 20, 30$"
    with pytest.raises(UsageError, match=rf"run@best: a run with checkpoints.best_metric .* {steps}"):
        places.newest_at(f"{run}@best")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(UsageError, match=r"is required; it has no checkpoint yet$"):
        places.newest_at(f"{run}@best")


def test_a_directory_may_have_such_a_name(run: Path) -> None:
    renamed = run.rename(run.with_name("run@best"))
    assert len(places.find_place(renamed).checkpoints) == 3


def test_ls_of_a_run_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert call("ls", tmp_path) == 0
    assert lines_of(capsys) == [f"no checkpoints in {tmp_path}"]


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_looking_needs_no_torch(run: Path, command: str) -> None:
    code = (
        "import sys\nfrom accel_train import cli\n"
        f"assert cli._main(['checkpoints', {command!r}, {str(run)!r}]) == 0\n"
        "assert not {'torch', 'accelerate', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# ------------------------------------------------------------------------------------------------------------- verify
@pytest.mark.parametrize("command", ["verify", "ls"])
def test_a_checkpoint_that_retention_deletes_meanwhile_is_not_called_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    original = commit.hash_file

    def deleting(file: Path) -> str:
        if file.is_relative_to(run / "checkpoints" / name(10)) and file.exists():
            commit.remove(run / "checkpoints" / name(10))
        return original(file)

    monkeypatch.setattr(commit.verify, "__defaults__", (deleting,))
    assert call(command, run) == 0
    shown = capsys.readouterr().out
    assert name(10) not in shown
    assert name(20) in shown


def test_verify_finds_damage_and_says_so_with_its_code(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", run) == 0
    assert [line.split()[:2] for line in lines_of(capsys)] == [["ok", name(s)] for s in (10, 20, 30)]
    (run / "checkpoints" / name(10) / "notes.txt").write_text("mine")
    flip_bit(run / "checkpoints" / name(20) / "optimizer" / "exp_avg.safetensors")
    assert call("verify", run) == 1
    lines = lines_of(capsys)
    assert lines[1] == "         not in its manifest, and so not verified: notes.txt"
    assert lines[2].startswith(f"DAMAGED  {name(20)}  optimizer/exp_avg.safetensors has changed")
    assert call("verify", run / "checkpoints" / name(20)) == 1
    assert call("verify", run / "checkpoints" / name(30)) == 0


# -------------------------------------------------------------------------------------------------------- wrong paths
WITH_A_PLACE = {
    "ls": [],
    "verify": [],
    "diff": ["other"],
    "prune": ["--keep_last", "1"],
    "convert": ["out"],
    "export": ["out"],
    "push": ["--repo_id", "org/model"],
}


@pytest.mark.parametrize("command", WITH_A_PLACE)
def test_a_wrong_path_is_refused_with_what_is_there(tmp_path: Path, command: str) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "file.txt").write_text("")
    more = [str(tmp_path / word) if word in ("out", "other") else word for word in WITH_A_PLACE[command]]
    for place, says in (
        (tmp_path / "runs" / "mien", r"does not exist \(.*runs contains mine\)"),
        (tmp_path / "file.txt", "is a file|not a valid safetensors file"),
        (tmp_path / "runs", "contains mine|holds mine|but mine"),
    ):
        with pytest.raises(UsageError, match=says):
            call(command, place, *more)
    assert not (tmp_path / "out").exists()


def test_what_was_never_finished_is_no_checkpoint(run: Path) -> None:
    unfinished = run / "checkpoints" / commit.temporary_name(40, "abc")
    unfinished.mkdir()
    with pytest.raises(UsageError, match="an unfinished or half-deleted checkpoint"):
        call("verify", unfinished)
    (run / "empty" / "checkpoints").mkdir(parents=True)
    for command in ("verify", "export"):
        with pytest.raises(UsageError, match="contains no checkpoint"):
            call(command, run / "empty", *([str(run / "out")] if command == "export" else []))


# --------------------------------------------------------------------------------------------------------------- diff
def write(directory: Path, stem: str = "model", **values: Tensor) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(values, directory / f"{stem}.safetensors")
    return directory


def test_equal_tensors_are_equal_whatever_holds_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run against its newest, one file against shards, ours against diffusers' names, a file by itself."""
    assert call("diff", run, run / "checkpoints" / name(30)) == 0
    count = len(values_of(model_of(0)))
    assert lines_of(capsys)[2:] == [
        f"model: equal ({count} tensors)",
        f"ema: equal ({count} tensors)",
        f"optimizer: equal ({2 * count} tensors)",
        "equal",
    ]
    values = {f"t{i}": torch.randn(3, 5) for i in range(5)}
    one = write(tmp_path / "one", "diffusion_pytorch_model", **values)
    (tmp_path / "many").mkdir()
    save_torch_state_dict(values, tmp_path / "many", max_shard_size=130)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert call("diff", one, tmp_path / "many") == 0
    assert call("diff", one / "diffusion_pytorch_model.safetensors", tmp_path / "many") == 0


def test_the_first_and_the_largest_difference_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure against fp64 arithmetic on whole tensors."""
    a, b = (values_of(model_of(step)) for step in (10, 20))
    assert call("diff", run / "checkpoints" / name(10), run / "checkpoints" / name(20)) == 1
    text = capsys.readouterr().out
    apart = {n: (a[n].double() - b[n].double()).abs().max().item() for n in a}
    first = min(n for n in a if apart[n] > 0)
    largest = max(apart, key=lambda n: apart[n])
    lines = text.splitlines()
    assert lines[0].endswith("checkpoint_00000010 (step 10)")
    assert lines[3].startswith(f"  first by name: {first} at ")
    assert lines[4].startswith(f"  largest: {largest} at ")
    assert lines[4].endswith(f"apart by {apart[largest]:.3g}")
    norm = math.sqrt(sum((a[n].double() - b[n].double()).square().sum().item() for n in a))
    norm /= math.sqrt(sum(a[n].double().square().sum().item() for n in a))
    differing = f"{sum(v > 0 for v in apart.values())} of {len(a)} common tensors differ"
    assert lines[2] == f"model: {differing}; relative difference {norm:.3g}"
    assert lines[-1] == "different"


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_the_place_of_a_difference_is_right_across_chunks(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "CHUNK", chunk)
    a = torch.arange(60, dtype=torch.float64).reshape(3, 4, 5)
    b = a.clone()
    b[2, 1, 3] += 0.5
    b[0, 3, 4] -= 0.25
    b[1, 0, 0] += 0.125
    left, right = write(tmp_path / "a", x=a, y=a.clone()), write(tmp_path / "b", x=b, y=a)
    found = compare.compare(weights.find_tensors(left), weights.find_tensors(right))
    assert found.differing == 1
    assert found.largest == compare.Difference("x", 0.5, (2, 1, 3), (48.0, 48.5))
    assert found.first == found.largest
    squares = 0.5**2 + 0.25**2 + 0.125**2
    assert found.relative == pytest.approx(math.sqrt(squares / (2 * a.square().sum().item())), rel=1e-12)


ODD: dict[str, tuple[Tensor, Tensor, float | None]] = {
    "the same NaN": (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), None),
    "the same infinity": (torch.tensor([math.inf]), torch.tensor([math.inf]), None),
    "NaN in one": (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), math.inf),
    "infinity in one": (torch.tensor([1.0, math.inf]), torch.tensor([1.0, 2.0]), math.inf),
    "signs of zero": (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
    "whole numbers": (torch.tensor([1, 2**40]), torch.tensor([1, 2**40 + 3]), 3.0),
    "truth": (torch.tensor([True]), torch.tensor([False]), 1.0),
    "eight bits": (torch.ones(3).to(torch.float8_e4m3fn), torch.full((3,), 2.0).to(torch.float8_e4m3fn), 1.0),
    "complex": (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), 2.0),
    "nothing": (torch.zeros(0, 3), torch.zeros(0, 3), None),
    "a scalar": (torch.tensor(1.5), torch.tensor(1.0), 0.5),
    "other types of the same values": (torch.ones(2), torch.ones(2).bfloat16(), None),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_values(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, apart = ODD[case]
    left, right = write(tmp_path / "a", x=a), write(tmp_path / "b", x=b)
    code = call("diff", left, right)
    found = compare.compare(weights.find_tensors(left), weights.find_tensors(right))
    assert (found.largest.largest if found.largest else None) == apart
    assert code == (0 if apart is None and a.dtype == b.dtype else 1)
    assert lines_of(capsys)[-1] == ("equal" if code == 0 else "different")


def test_names_shapes_and_types_on_one_side_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", same=torch.ones(2), mine=torch.ones(1), shape=torch.ones(2, 3), kind=torch.ones(2))
    b = write(
        tmp_path / "b", same=torch.ones(2), yours=torch.ones(1), shape=torch.ones(3, 2), kind=torch.ones(2).half()
    )
    write(tmp_path / "b", "ema", same=torch.ones(2))
    assert call("diff", a, b) == 1
    assert lines_of(capsys)[2:] == [
        "model: 0 of 3 common tensors differ; relative difference 0",
        "  only in A: mine",
        "  only in B: yours",
        "  shapes: shape (2, 3) in A, (3, 2) in B",
        "  types: kind F32 in A, F16 in B",
        "ema: only in B",
        "different",
    ]


def test_bits_count_in_every_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "CHUNK", 1)
    a, b = write(tmp_path / "a", x=torch.tensor([-0.0, 0.0])), write(tmp_path / "b", x=torch.tensor([0.0, 0.0]))
    assert call("diff", a, b) == 1


def test_a_collection_on_one_side_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two kinds of weights side by side keep their names: neither is taken for the other."""
    a, b = write(tmp_path / "a", x=torch.ones(1)), write(tmp_path / "b", x=torch.ones(1))
    assert call("diff", a, b) == 0
    write(tmp_path / "b", "ema", x=torch.ones(1))
    assert call("diff", a, b) == 1
    write(tmp_path / "b", "diffusion_pytorch_model", x=torch.zeros(1))
    capsys.readouterr()
    assert call("diff", a, b) == 1
    assert lines_of(capsys)[2:] == [
        "model: equal (1 tensors)",
        "diffusion_pytorch_model: only in B",
        "ema: only in B",
        "different",
    ]


def test_diff_holds_one_pair_at_a_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = [0]
    original = weights.TensorReader.read

    def counted(self: weights.TensorReader, name: str) -> Tensor:
        tensor = original(self, name)
        alive.add(tensor)
        most[0] = max(most[0], len(alive))
        return tensor

    monkeypatch.setattr(weights.TensorReader, "read", counted)
    call("diff", run / "checkpoints" / name(10), run / "checkpoints" / name(20))
    assert 2 <= most[0] <= 3  # a pair, and the first of the next


# -------------------------------------------------------------------------------------------------------------- prune
def test_prune_goes_by_the_options_of_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    assert call("prune", run, "--dry-run") == 0
    assert sorted(run.rglob("*")) == before
    lines = lines_of(capsys)
    assert lines[0].split()[:2] == [name(10), "remove"]
    assert lines[2].split(maxsplit=2) == [name(30), "keep", "newest, last 2"]
    assert lines[-1].endswith("would be freed; nothing was touched")
    assert call("prune", run) == 0
    assert steps_in(run) == [20, 30]
    assert capsys.readouterr().out.splitlines()[-1].endswith("freed")
    assert call("prune", run / "checkpoints", "--keep_state_last", "1") == 0
    assert commit.verify(run / "checkpoints" / name(20)).manifest["state"] is False
    assert "optimizer/index.json" in commit.verify(run / "checkpoints" / name(30)).manifest["files"]


def test_prune_removes_unfinished_saves_of_other_hosts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    torn, complete = (folder / f".tmp-{name(step)}-node-0-41-abc{step}" for step in (20, 40))
    shutil.copytree(folder / name(20), torn)
    # A save that lacks its name alone may be all there is of the last hours.
    shutil.copytree(folder / name(30), complete)
    assert call("prune", run, "--dry-run", "--keep_last", "0") == 0
    first, *_ = [line.split() for line in lines_of(capsys) if line.startswith(".tmp")]
    assert first[:2] == [torn.name, "remove"]
    assert torn.is_dir()
    holder = lock.acquire(run)
    assert call("prune", run, "--dry-run", "--keep_last", "0") == 0
    (held,) = [line.split(maxsplit=2) for line in lines_of(capsys) if line.startswith(torn.name)]
    assert held[1:] == ["keep", "unfinished, maybe in progress: the run is in use, or its file system has no locks"]
    holder.release()
    assert call("prune", run, "--keep_last", "0") == 0
    assert (torn.exists(), complete.is_dir(), steps_in(run)) == (False, True, [10, 20, 30])


@pytest.mark.parametrize("flags", [("--dry-run",), ()])
def test_without_locks_prune_leaves_unfinished_saves_alone(
    run: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run on another host may be writing them."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    (run / LOCK_FILE).touch()
    monkeypatch.setattr(fcntl, "flock", unsupported)
    save = run / "checkpoints" / f".tmp-{name(20)}-node-0-41-abc"
    shutil.copytree(run / "checkpoints" / name(20), save)
    assert call("prune", run, "--keep_last", "1", *flags) == 0
    (line,) = [line.split(maxsplit=2) for line in lines_of(capsys) if line.startswith(save.name)]
    assert line[1] == "keep"
    assert line[2].endswith("or its file system has no locks")
    assert save.is_dir()


FLAGS: dict[str, tuple[str, list[int]]] = {
    "last": ("--keep_last 1", [30]),
    "best": ("--keep_last 1 --keep_best 1 --best_metric loss --best_mode max", [10, 30]),
    "every": ("--keep_last 1 --keep_every 20", [20, 30]),
    "steps": ("--keep_last 1 --keep_window_steps 10", [20, 30]),
    "epochs": ("--keep_last 1 --keep_window_epochs 2.0", [10, 20, 30]),
    "pinned": (f"--keep_last 1 --pinned {name(10)}", [10, 30]),
    "all": ("--keep_last 0", [10, 20, 30]),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags_go_over_them(run: Path, case: str) -> None:
    flags, left = FLAGS[case]
    assert call("prune", run, *flags.split()) == 0
    assert steps_in(run) == left


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--keep_last=-1", "keep_last: -1 is refused"),
        ("--keep_best 1", "keep_best: 1: has no effect without"),
        ("--keep_best 1 --best_metric los", "best_metric: 'los' is in no checkpoint of this run.*they have loss"),
        ("--pinned checkpoint_10", "--pinned checkpoint_10: there is no such checkpoint.*checkpoint_00000010"),
        ("--keep_window_epochs nan", "keep_window_epochs"),
    ],
)
def test_flags_that_cannot_be_obeyed_delete_nothing(run: Path, flags: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call("prune", run, *flags.split())
    assert steps_in(run) == [10, 20, 30]


def test_prune_needs_to_know_what_to_keep(run: Path) -> None:
    (run / "config.yaml").unlink()
    with pytest.raises(UsageError, match="give --keep_last"):
        call("prune", run)
    with pytest.raises(UsageError, match="a run is required"):
        call("prune", run / "checkpoints" / name(10), "--keep_last", "1")
    assert steps_in(run) == [10, 20, 30]
    assert call("prune", run, "--keep_last", "1") == 0


def test_what_is_newer_than_the_newest_that_verifies_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand nothing has been committed: a damaged newest may be all that is left of the last hours."""
    flip_bit(run / "checkpoints" / name(30) / "model.safetensors")
    assert call("prune", run, "--keep_last", "1") == 0
    assert steps_in(run) == [20, 30]
    assert "damaged, newer than the newest that verifies" in capsys.readouterr().out
    flip_bit(run / "checkpoints" / name(20) / "model.safetensors")
    with pytest.raises(UsageError, match="no checkpoint verifies"):
        call("prune", run, "--keep_last", "1")


def test_what_could_not_go_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rename = os.rename

    def refusing(source: Any, target: Any) -> None:
        if Path(source).name == name(10):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    assert call("prune", run, "--keep_last", "1") == 1
    assert steps_in(run) == [10, 30]
    lines = lines_of(capsys)
    assert lines[0].split()[:2] == [name(10), "FAILED"]
    assert "Permission denied" in lines[0]


def test_what_cannot_be_read_now_is_no_damage_and_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unreadable(run / "checkpoints" / name(10) / "manifest.json")
    assert call("prune", run, "--keep_last", "1") == 0
    assert steps_in(run) == [10, 30]
    kept = ["keep", "manifest.json cannot be read now: Input/output error"]
    assert lines_of(capsys)[0].split(maxsplit=2) == [name(10), *kept]
    assert call("verify", run) == 1
    assert lines_of(capsys)[0] == f"UNREADABLE {name(10)}  {kept[1]}"


def test_what_waits_to_be_pushed_stays(run: Path) -> None:
    HubQueue(run).add(Entry(name(10), 10, "abc", "org/model"))
    call("prune", run, "--keep_last", "1")
    assert steps_in(run) == [10, 30]


HOLD = """
import fcntl, sys
with open(sys.argv[1], "a+") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write("process 7 on host")
    lock.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_run_that_trains_is_not_pruned(run: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(run / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(UsageError, match="in use by process 7 on host"):
            call("prune", run)
        assert call("prune", run, "--dry-run") == 0
        assert steps_in(run) == [10, 20, 30]
    assert call("prune", run) == 0
    assert steps_in(run) == [20, 30]
    # The name of the killed process is still there for `accel-train monitor`.
    assert (run / ".lock").read_text() == "process 7 on host"


def test_prune_knows_every_option_of_retention() -> None:
    flags = set(vars(build_parser().parse_args(["checkpoints", "prune", "run"])))
    options = {n for n in asdict(CheckpointConfig()) if n.startswith(("keep_", "best_", "pinned"))}
    assert options == flags - {"command", "action", "place", "dry_run"}


# ------------------------------------------------------------------------------------------------------------- export
LOAD = """
import sys, torch
from accel_train.domains.models.mmdit import MultimodalMMDiT
model = MultimodalMMDiT.from_pretrained(sys.argv[1])
assert not [m for m in sys.modules if m.startswith(("accelerate", "accel_train.checkpoints", "accel_train.training"))]
torch.save({n: p.detach() for n, p in model.named_parameters()}, sys.argv[2])
"""


def loaded_elsewhere(directory: Path, tmp_path: Path) -> dict[str, Tensor]:
    """The parameters after ``from_pretrained`` in a fresh process, which imports nothing of training."""
    out = tmp_path / "loaded.pt"
    subprocess.run([sys.executable, "-c", LOAD, str(directory), str(out)], check=True, cwd=ROOT)
    return torch.load(out, weights_only=True)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_an_export_of_the_demo_model_loads_in_a_fresh_process(tmp_path: Path) -> None:
    demo = MultimodalMMDiTConfig(ModelConfig(size="demo").transformer(), 500, 32, 24, 1)
    model = model_of(3, demo)
    checkpoint(tmp_path / "run", 7, model)
    assert call("export", tmp_path / "run", tmp_path / "out", "--weights", "model") == 0
    assert_same(loaded_elsewhere(tmp_path / "out", tmp_path), values_of(model))
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), values_of(model))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == to_tree(demo)
    assert (tmp_path / "out" / "assets" / "tokenizer.json").read_text() == '{"vocabulary": ["a"]}'
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": 1}'
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *("model.safetensors", "config.json", "assets", "generation_config.json", "experiment.json"),
    }
    assert {p.name for p in tmp_path.iterdir()} == {"run", "out", "loaded.pt"}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # what transformers asks for


def test_a_large_export_is_split_as_the_hub_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SHARD_BYTES", 4000)
    model = model_of(3)
    call("export", checkpoint(tmp_path / "run", 7, model), tmp_path / "out", "--weights", "model")
    shards = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.numel() * 4 for v in values_of(model).values())
    assert_same(loaded_elsewhere(tmp_path / "out", tmp_path), values_of(model))


def test_an_export_takes_the_average_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights that evaluations and ``load`` use."""
    values = values_of(model_of(3))
    place = checkpoint(tmp_path / "run", 7, model_of(3))
    call("export", place, tmp_path / "out")
    assert "EMA weights of" in capsys.readouterr().out
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), {name: v * 0.5 for name, v in values.items()})
    assert json.loads((tmp_path / "out" / "experiment.json").read_text())["weights"] == "ema"
    files = dict(commit.verify(place).manifest["files"])
    del files["ema.safetensors"]
    commit.rewrite_manifest(place, {"files": files})
    call("export", place, tmp_path / "without")
    assert_same(load_file(tmp_path / "without" / "model.safetensors"), values)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("source", ["model", "ema"])
def test_an_export_rounds_the_exact_weights_once(
    tmp_path: Path, saved: torch.dtype, precision: str, source: str
) -> None:
    """Whatever precision the checkpoint was saved in: its fp32 masters are beside its optimizer state."""
    model = model_of(5)
    place = checkpoint(tmp_path / "run", 7, model, precision=saved)
    call("export", place, tmp_path / "out", "--precision", precision, "--weights", source)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    exact = values_of(model) if source == "model" else {n: v * 0.5 for n, v in values_of(model).items()}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), {n: v.to(dtype) for n, v in exact.items()})


def test_without_state_the_rounded_weights_are_all_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accel_train.store.retention import strip_state

    place = checkpoint(tmp_path / "run", 7, model_of(5), precision=torch.bfloat16)
    strip_state(place)
    call("export", place, tmp_path / "out", "--weights", "model")
    assert "holds these weights in BF16" in capsys.readouterr().out.replace("has", "holds")
    expected = {n: v.bfloat16().float() for n, v in values_of(model_of(5)).items()}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_an_export_reads_what_the_manifest_lists(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "run", 7)
    files = dict(commit.verify(place).manifest["files"])
    del files["ema.safetensors"]
    commit.rewrite_manifest(place, {"files": files})
    with pytest.raises(UsageError, match=r"has no ema\.safetensors"):
        call("export", place, tmp_path / "out", "--weights", "ema")


def test_an_export_that_cannot_be_right_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    large, broken = model_of(1), model_of(2)
    with torch.no_grad():
        large.text_head.weight[0, 0] = 1e5
        broken.text_head.weight[0, 0] = math.nan
    places = {
        "fp16": (
            checkpoint(tmp_path / "large", 7, large),
            r"text_head.weight has values beyond 65504",
            ["--precision", "fp16", "--weights", "model"],
        ),
        "nan": (checkpoint(tmp_path / "broken", 7, broken), r"text_head.weight contains 1 value\(s\) that are NaN", []),
        "damaged": (checkpoint(tmp_path / "damaged", 7), "sha256 differs", []),
    }
    flip_bit(places["damaged"][0] / "model.safetensors")
    for place, says, flags in places.values():
        with pytest.raises(UsageError, match=says):
            call("export", place, tmp_path / "out", *flags)
    assert {p.name for p in tmp_path.iterdir()} == {"large", "broken", "damaged"}
    assert call("export", places["fp16"][0], tmp_path / "out", "--precision", "bf16") == 0
    with pytest.raises(UsageError, match=r"contains assets, config.json, experiment.json, .*; give a"):
        call("export", places["fp16"][0], tmp_path / "out")


def test_an_export_of_a_run_takes_the_newest_that_verifies(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(run / "checkpoints" / name(30) / "model.safetensors")
    (tmp_path / "out").mkdir()  # empty, and so free to use
    call("export", run, tmp_path / "out", "--weights", "model")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), values_of(model_of(20)))
    passed, done, without = lines_of(capsys)
    assert without.startswith("without model.py and verify.py: config.json names no pipeline")
    assert passed.startswith("skipped: ")
    assert name(30) in passed
    assert "(step 20) in fp32" in done


def test_without_an_average_none_is_exported(run: Path, tmp_path: Path) -> None:
    place = run / "checkpoints" / name(30)
    files = dict(commit.open_verified(place).manifest["files"])
    del files["ema.safetensors"]
    commit.rewrite_manifest(place, {"files": files})
    (place / "ema.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no ema.safetensors.*export --weights model"):
        call("export", place, tmp_path / "out", "--weights", "ema")


# ------------------------------------------------------------------------------------------------------------ convert
def converted(source: Path, destination: Path, *flags: str) -> dict[str, Tensor]:
    """What came out, after checking that it is a checkpoint of ours that a run can start from."""
    assert call("convert", source, destination, *flags) == 0
    target = destination / "checkpoint_00000000"
    manifest = commit.verify(target).manifest
    assert (manifest["step"], manifest["state"]) == (0, False)
    assert [fetch.find_weights(str(place))[0] for place in (target, destination)] == [target, target]
    assert not [p for p in destination.iterdir() if p != target]
    assert not [p for p in target.iterdir() if p.is_dir()]
    found = read_weights(target)
    assert {v.dtype for v in found.values() if v.is_floating_point()} == {torch.float32}
    return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))


class Counter:
    """What ``register_for_checkpointing`` takes, and writes as a pickle."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.fixture
def saved_state(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Tensor], dict[str, Tensor]]]:
    """What ``Accelerator.save_state`` itself writes of two models, an optimizer, a scheduler and a counter."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    accelerator = Accelerator(cpu=True)
    first, second = Net(), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(first.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    first, second, optimizer, scheduler = accelerator.prepare(first, second, optimizer, scheduler)
    accelerator.register_for_checkpointing(Counter())
    accelerator.backward(first(torch.randn(5, 4)).sum())
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    yield tmp_path / "state", first.state_dict(), second.state_dict()
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def test_what_save_state_wrote_becomes_a_checkpoint(
    saved_state: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, first, second = saved_state
    (source / "model-00009-of-00009.safetensors").write_bytes(b"left over")
    assert_same(converted(source, tmp_path / "first"), first)
    shown = capsys.readouterr().out
    assert "left out: optimizer.bin: a pickle" in shown
    assert "the optimizer starts from zero" in shown
    for other in ("scheduler.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl"):
        assert f"left out: {other}: a pickle" in shown
    assert "left out: model_1.safetensors: other weights; take them with --stem model_1" in shown
    # Advice to take them with --stem model, which was done, would be of no use.
    assert "left out: model-00009-of-00009.safetensors: no index names it; if it belongs" in shown
    assert_same(converted(source, tmp_path / "second", "--stem", "model_1"), second)
    model = Net()
    weights.load_weights(tmp_path / "first" / "checkpoint_00000000", "model", model)
    assert_same(model.state_dict(), first)


@pytest.mark.parametrize("shard", ["10KB", "1GB"])
def test_what_transformers_saved_becomes_a_checkpoint(tmp_path: Path, shard: str) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = BertModel(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bert", max_shard_size=shard)
    assert (tmp_path / "bert" / "model.safetensors.index.json").exists() == (shard == "10KB")
    assert_same(converted(tmp_path / "bert", tmp_path / "out"), {n: v.float() for n, v in model.state_dict().items()})
    kept = json.loads((tmp_path / "out" / "checkpoint_00000000" / "config.json").read_text())
    assert kept["hidden_size"] == 16
    call("export", tmp_path / "out" / "checkpoint_00000000", tmp_path / "back", "--precision", "bf16")
    back = BertModel.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    assert_same(back.state_dict(), model.state_dict())


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("shard", ["10KB", "1GB"])
def test_what_diffusers_saved_becomes_a_checkpoint(tmp_path: Path, variant: str | None, shard: str) -> None:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4, **blocks)
    model = model.half() if variant else model
    model.save_pretrained(tmp_path / "unet", variant=variant, max_shard_size=shard)
    assert (len(list((tmp_path / "unet").glob("*.safetensors"))) > 1) == (shard == "10KB")
    expected = {n: v.float() for n, v in model.state_dict().items()}
    assert_same(converted(tmp_path / "unet", tmp_path / "out"), expected)


def test_a_large_conversion_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SHARD_BYTES", 100)
    values = {f"t{i}": torch.randn(3, 5, dtype=torch.float64).float().double() for i in range(5)}
    found = converted(write(tmp_path / "in", **values), tmp_path / "out")
    assert_same(found, {n: v.float() for n, v in values.items()})
    assert len(list((tmp_path / "out").rglob("model-*-of-00005.safetensors"))) == 5


def test_where_there_are_several_one_must_be_named(tmp_path: Path) -> None:
    write(tmp_path / "in", "model.fp16", x=torch.ones(2).half())
    assert_same(converted(tmp_path / "in", tmp_path / "a"), {"x": torch.ones(2)})
    write(tmp_path / "in", "model.bf16", x=torch.zeros(2).bfloat16())
    with pytest.raises(UsageError, match=r"contains model.bf16, model.fp16; choose one with --stem"):
        call("convert", tmp_path / "in", tmp_path / "b")
    with pytest.raises(UsageError, match=r"has no such weights; it has model.bf16, model.fp16"):
        call("convert", tmp_path / "in", tmp_path / "b", "--stem", "model")
    assert_same(converted(tmp_path / "in", tmp_path / "b", "--stem", "model.bf16"), {"x": torch.zeros(2)})
    write(tmp_path / "in", "model", x=torch.full((2,), 3.0))  # the plain one goes before its variants
    assert_same(converted(tmp_path / "in", tmp_path / "c"), {"x": torch.full((2,), 3.0)})


def _distributed(directory: Path) -> Path:
    """A real DCP checkpoint, in the folder that Accelerate gives it."""
    import torch.distributed.checkpoint as dcp

    place = directory / "pytorch_model_fsdp_0"
    dcp.save({"x": torch.ones(2)}, checkpoint_id=str(place), no_dist=True)
    assert (place / ".metadata").exists()
    return directory


def _half_of_it(directory: Path) -> Path:
    """As it looks on a host that has none of the data files."""
    for file in (_distributed(directory) / "pytorch_model_fsdp_0").glob("*.distcp"):
        file.unlink()
    return directory


def _deepspeed(directory: Path) -> Path:
    directory.mkdir()
    (directory / "zero_to_fp32.py").write_text("raise SystemExit('run')")
    (directory / "pytorch_model").mkdir()
    (directory / "pytorch_model" / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps({}))
    return directory


def _only_bin(directory: Path) -> Path:
    directory.mkdir()
    torch.save({"x": torch.ones(1)}, directory / "pytorch_model.bin")
    return directory


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_distributed, ".metadata is a pickle.*accelerate merge-weights '/.*/saved here/pytorch_model_fsdp_0' OUT"),
        (_half_of_it, "Its .metadata is a pickle"),
        (_deepspeed, "python '/.*/saved here/zero_to_fp32.py' '/.*/saved here' OUT --safe_serialization"),
        (_only_bin, r"are a pickle \(pytorch_model.bin\).*safetensors.torch.save_file"),
        (lambda p: _only_bin(p) / "pytorch_model.bin", "are a pickle"),
    ],
)
def test_what_only_a_pickle_holds_is_refused_with_a_way_out(
    tmp_path: Path, make: Callable[[Path], Path], says: str
) -> None:
    place = make(tmp_path / "saved here")
    with pytest.raises(UsageError, match=says):
        call("convert", place, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_of_weights_is_refused_with_what_converts_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", stem="model.bf16", x=torch.ones(2))
    with pytest.raises(
        UsageError, match=r"is a file; a directory .*: give \S*/in with --stem model\.bf16\. For a LoRA file of"
    ):
        call("convert", folder / "model.bf16.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert_same(converted(folder, tmp_path / "out", "--stem", "model.bf16"), {"x": torch.ones(2)})


def test_a_conversion_that_cannot_be_right_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    cases = {
        "nan": ({"x": torch.tensor([math.nan])}, "x contains 1 value"),
        "large": ({"x": torch.tensor([1e300], dtype=torch.float64)}, "beyond 3.40282e.38"),
        "eight": ({"x": torch.ones(1).to(torch.float8_e4m3fn)}, "x has the type F8_E4M3"),
    }
    for case, (values, says) in cases.items():
        with pytest.raises(UsageError, match=says):
            call("convert", write(tmp_path / case, **values), tmp_path / "out")
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    sound = write(tmp_path / "sound", x=torch.ones(1))
    converted(sound, tmp_path / "out")
    with pytest.raises(UsageError, match="exists already"):
        call("convert", sound, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        call("convert", sound, tmp_path / "file")


def test_ours_is_not_converted_nor_written_into_a_run(run: Path, tmp_path: Path) -> None:
    for place in (run, run / "checkpoints" / name(10)):
        with pytest.raises(UsageError, match="already accel_train's own"):
            call("convert", place, tmp_path / "out")
    sound = write(tmp_path / "sound", x=torch.ones(1))
    for place in (run, run / "checkpoints", run / "checkpoints" / name(0)):
        with pytest.raises(UsageError, match="is inside the run"):
            call("convert", sound, place)
    assert steps_in(run) == [10, 20, 30]


def test_a_config_loses_what_would_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I58: what other tools would run or follow is not carried along, and it is said."""
    source = write(tmp_path / "in", x=torch.ones(1))
    config = {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True, "_name_or_path": "../../etc"}
    config |= {"custom_pipelines": {}, "_attn_implementation_internal": "evil", "hidden_size": 4, "_class_name": "Net"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "evil.py").write_text("raise SystemExit")
    converted(source, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "checkpoint_00000000" / "config.json").read_text())
    assert kept == {"hidden_size": 4, "_class_name": "Net"}
    assert not list((tmp_path / "out").rglob("*.py"))
    shown = capsys.readouterr().out
    for key in config.keys() - kept.keys():
        assert f"left out: config.json: {key}: " in shown
    (source / "config.json").write_text("{")
    converted(source, tmp_path / "again")
    assert "left out: config.json: cannot be read as JSON" in capsys.readouterr().out
    assert not (tmp_path / "again" / "checkpoint_00000000" / "config.json").exists()


# ----------------------------------------------------------------------------------------------- I57: nothing ever runs
def test_no_command_runs_a_pickle(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Malicious pickles under every name that tools read, in everything that a command looks at."""
    state = write(tmp_path / "in" / "state", x=torch.ones(1))
    baits = [plant(run), plant(run / "checkpoints" / name(30)), plant(run / "checkpoints" / name(10)), plant(state)]
    plant(state / "pytorch_model_fsdp_0")
    monkeypatch.chdir(tmp_path)
    for command in ("ls", "verify"):
        assert call(command, run) == 0
    call("ls", run, "--quick")
    call("diff", run, run / "checkpoints" / name(10))
    call("diff", state, run)
    call("prune", run, "--keep_last", "1", "--dry-run")
    call("prune", run, "--keep_last", "2", "--keep_state_last", "1")
    call("export", run, tmp_path / "out")
    call("convert", state, tmp_path / "converted")
    (state / "model.safetensors").unlink()
    for command in (("diff", state, run), ("convert", state, tmp_path / "more"), ("diff", state / "model.pt", run)):
        with pytest.raises(UsageError, match="pickle"):
            call(*command)
    with pytest.raises(UsageError):
        call("push", run, "--repo_id", "not a name")
    assert not [bait for bait in baits if bait.exists()]
    pickle.loads((state / "model.pt").read_bytes())
    assert baits[3].exists()  # they do bite


def test_indexes_that_lead_out_of_a_checkpoint_are_not_followed(run: Path, tmp_path: Path) -> None:
    place = run / "checkpoints" / name(30)
    outside = write(tmp_path, "outside", layer=torch.ones(1)) / "outside.safetensors"
    index = place / "optimizer" / "index.json"
    for file in ("optimizer/../../../../outside.safetensors", str(outside), "model.safetensors", "optimizer/"):
        index.write_text(json.dumps({"step": 1, "state": {"exp_avg": {"layer": file}}}))
        with pytest.raises(UsageError, match=r"not a file next to it|not there"):
            call("diff", place, run / "checkpoints" / name(10))


def test_a_manifest_that_leads_out_of_a_checkpoint_is_not_followed(run: Path, tmp_path: Path) -> None:
    place = run / "checkpoints" / name(30)
    outside = tmp_path / "secret"
    outside.write_text("secret")
    sound = commit.open_verified(place).manifest
    for listed in ("assets/../../../../secret", str(outside)):
        files = sound["files"] | {listed: commit.seal_file(outside)}
        atomic_files.write_json_in_place(place / "manifest.json", strict_json.sealed(sound | {"files": files}))
        with pytest.raises(UsageError, match="which is not a valid file name in a checkpoint"):
            call("export", place, tmp_path / "a" / "b" / "out")
    assert not (tmp_path / "a").exists()


# --------------------------------------------------------------------------------------------------------------- push
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the Hub library's own uploads
def test_push_takes_the_options_of_the_run_and_the_flags_over_them(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.hub_server import serving

    (run / "config.yaml").write_text("hub: {repo_id: org/model, private: false, finish_minutes: 0.5}\n")
    with serving(monkeypatch, tmp_path / "hf_home") as server:
        assert call("push", run) == 0
        assert "org/model" in lines_of(capsys)[-1]
        assert not server.repositories["org/model"].private
        assert call("push", run / "checkpoints" / name(10), "--repo_id", "org/other", "--revisions", "tag") == 0
        assert {"org/model", "org/other"} <= set(server.repositories)
    capsys.readouterr()
    call("ls", run)
    rows = lines_of(capsys)
    assert "org/model" in rows[3]
    assert "org/other" in rows[1]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_push_takes_a_step_of_a_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.hub_server import serving

    with serving(monkeypatch, tmp_path / "hf_home") as server:
        assert call("push", f"{run}@20", "--repo_id", "org/model") == 0
        assert set(server.repositories["org/model"].branches) == {"main", "step-00000020"}


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_hub_that_will_not_have_it_is_an_exit_code(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.hub_server import Fault, serving

    with serving(monkeypatch, tmp_path / "hf_home") as server:
        server.faults = [Fault("commit", 503, count=99)]
        assert call("push", run, "--repo_id", "org/model", "--finish_minutes", "0.001") == 1
        assert "not pushed: 0 pushed, 1 not: checkpoint_00000030" in lines_of(capsys)[-1]
    with pytest.raises(UsageError, match=r"finish_minutes: -1.0 is refused"):
        call("push", run, "--repo_id", "org/model", "--finish_minutes=-1")


# ---------------------------------------------------------------------------------------------------------------- cli
@pytest.mark.parametrize("command", sorted(WITH_A_PLACE))
def test_help_of_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        call(command, "--help")
    assert left.value.code == 0
    assert f"accel-train checkpoints {command}" in capsys.readouterr().out


def test_the_process_ends_with_the_code_of_the_command(run: Path) -> None:
    flip_bit(run / "checkpoints" / name(10) / "ema.safetensors")
    for arguments, code in ((["verify", str(run)], 1), (["ls", str(run)], 0), (["ls", str(run / "no")], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "accel_train.cli", "checkpoints", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
