"""metrics.jsonl, trackers, progress and the recorder that writes them."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers, register_tracker_class

from accel_train.config import UsageError
from accel_train.domains.text.samples import write_samples
from accel_train.metrics import environment, progress, recorder, records
from accel_train.metrics.profiling import gpu_figures
from accel_train.metrics.progress import LogConfig
from accel_train.metrics.recorder import Recorder
from accel_train.metrics.records import LineWriter, encode, read_metrics, repair_metrics, write_json
from accel_train.metrics.throughput import Throughput
from accel_train.metrics.tracking import trackers
from accel_train.runtime import exiting
from accel_train.wording import FILE_ONLY
from tests import compiling
from tests.waiting import PATIENCE_SECONDS, free_port

FIELDS: dict[str, object] = {
    "loss": 3.4118273,
    "epoch": 0.25,
    "lr": 1.2e-3,
    "grad_norm": 0.7,
    "global_batch_size": 64,
    "samples_per_second": 412.3,
    "tokens_per_second": 8200.0,
    "step_seconds": 92 / 1380,
    "data_wait_fraction": 0.01,
}


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def strict(text: str | bytes) -> dict[str, object]:
    """JSON as the standard has it: NaN and Infinity are refused."""

    def refuse(name: str) -> object:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


# The file


@dataclass(frozen=True)
class Group:
    path: Path
    betas: tuple[float, float]


def test_floats_keep_every_digit_and_all_lines_are_valid_json() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [*torch.randn(200, generator=generator, dtype=torch.float64).exp().tolist(), 5e-324, 1.1, 1e300]
    assert strict(encode({"values": values}))["values"] == values
    line = {
        "nan": math.nan,
        "inf": math.inf,
        "minus": -math.inf,
        "tensor": torch.tensor(0.1, dtype=torch.float32),
        "bf16": torch.tensor([1.5, math.nan], dtype=torch.bfloat16),
        "numpy": np.float32(0.25),
        "int": np.int64(2**40),
        "group": Group(Path("a/b"), (0.9, 0.95)),
        "dtype": torch.bfloat16,
        "bad text": "\udcff newline\n",
        "none": None,
        "flag": True,
        3: {"nested": {1}},
    }
    encoded = encode(line)
    assert encoded.count(b"\n") == 1
    parsed = strict(encoded)
    assert (parsed["nan"], parsed["inf"], parsed["minus"]) == ("NaN", "Infinity", "-Infinity")
    assert parsed["tensor"] == float(np.float32(0.1))
    assert parsed["bf16"] == [1.5, "NaN"]
    assert (parsed["numpy"], parsed["int"]) == (0.25, 2**40)
    assert parsed["group"] == {"path": "a/b", "betas": [0.9, 0.95]}
    assert (parsed["dtype"], parsed["none"], parsed["flag"]) == ("torch.bfloat16", None, True)
    assert parsed["3"] == {"nested": [1]}


def test_non_finite_numbers_come_back_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        encode({"event": "train", "step": 1, "loss": math.nan, "mode": "l2t"})
        + encode({"event": "evaluation", "step": 1, "l2t_nll": -math.inf})
        + encode({"event": "config", "config": {"name": "NaN"}})
    )
    train, evaluation, config = read_metrics(path)
    assert math.isnan(train["loss"])
    assert train["mode"] == "l2t"
    assert evaluation["l2t_nll"] == -math.inf
    assert config["config"] == {"name": "NaN"}


def test_each_line_is_one_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    calls: list[bytes] = []
    real_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        calls.append(data)
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    writer = LineWriter(path)
    for step in range(3):
        writer.write({"step": step})
    assert calls == path.read_bytes().splitlines(keepends=True)
    assert [r["step"] for r in read_metrics(path)] == [0, 1, 2]


def test_writers_at_the_same_time_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def write(name: int, writer: LineWriter) -> None:
        for i in range(100):
            writer.write({"writer": name, "i": i, "padding": "x" * 500})

    # Opened before any of them writes, as its docstring asks.
    writers = [LineWriter(path) for _ in range(4)]
    threads = [threading.Thread(target=write, args=item) for item in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [strict(line) for line in path.read_bytes().splitlines()]
    assert len(lines) == 400
    for name in range(4):
        assert [line["i"] for line in lines if line["writer"] == name] == list(range(100))


def test_a_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    writer = LineWriter(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            writer.write({"step": step})
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert "/dev/full" in caplog.text


def test_a_torn_line_does_not_spoil_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = LineWriter(path)
    writer.write({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, limits[1]))
    try:
        writer.write({"step": 2})  # only 4 bytes of it fit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write({"step": 3})
    assert path.read_bytes().splitlines()[1] == encode({"step": 2})[:4]
    assert [r["step"] for r in read_metrics(path)] == [1, 3]
    assert len(caplog.records) == 1


def test_a_directory_that_comes_back_is_written_to_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    writer = LineWriter(folder / "metrics.jsonl")
    writer.write({"step": 1})  # no such directory: lost, with a warning
    folder.mkdir()
    writer.write({"step": 2})
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl")] == [2]


def write_run(path: Path, last: int) -> list[bytes]:
    lines = [encode({"event": "environment"}), b'{"event":  "config",   "config": {"a": 1e-4}}\n']
    for step in range(10, last + 1, 10):
        lines.append(encode({"event": "train", "step": step, "loss": 1 / step}))
        if step % 20 == 0:
            lines.append(encode({"event": "checkpoint", "step": step}))
            lines.append(encode({"event": "evaluation", "step": step, "l2t_nll": 2.0}))
    path.write_bytes(b"".join(lines))
    return lines


def test_resuming_drops_torn_lines_and_steps_to_be_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = write_run(path, 60)
    with path.open("ab") as file:
        file.write(b'{"event": "train", "st')
    again = [i for i, r in enumerate(read_metrics(path)) if r["event"] in ("train", "evaluation") and r["step"] > 40]
    assert len(again) == 3
    assert repair_metrics(path, 40) == 4
    assert path.read_bytes() == b"".join(line for i, line in enumerate(lines) if i not in again)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_whole_file_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, 60)
    before = path.stat()
    assert repair_metrics(path, 60) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert repair_metrics(tmp_path / "none.jsonl", 5) == 0


def test_a_last_line_that_lacks_its_newline_alone_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = write_run(path, 20)
    path.write_bytes(b"".join(lines)[:-1])
    assert repair_metrics(path, 20) == 0
    assert path.read_bytes() == b"".join(lines)


def test_a_repair_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = write_run(path, 60)

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        repair_metrics(path, 40)
    assert path.read_bytes() == b"".join(lines)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_evaluation_json_is_valid_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    write_json(path, {"l2t_nll": 3.1})
    write_json(path, {"l2t_nll": torch.tensor(2.5), "t2l_cosine": math.nan})
    assert strict(path.read_text()) == {"l2t_nll": 2.5, "t2l_cosine": "NaN"}
    assert os.listdir(tmp_path) == ["evaluation.json"]


def test_an_evaluation_is_found_in_the_report_or_in_its_folder_of_other_data(tmp_path: Path) -> None:
    other = tmp_path / "other_data"
    assert (records.evaluated_report(tmp_path, 3), records.read_evaluation(tmp_path)) == (None, {})
    other.mkdir()
    write_json(other / "evaluation.json", {"step": 3, "measured_on": {"data.path": "b"}, "nll": math.inf, "n": 2})
    assert records.evaluated_report(tmp_path, 3) == other
    assert records.read_evaluation(other) == {"nll": math.inf, "n": 2.0}
    write_json(tmp_path / "evaluation.json", {"step": 4})
    assert [records.evaluated_report(tmp_path, step) for step in (3, 4, 5)] == [other, tmp_path, None]
    write_json(tmp_path / "evaluation.json", {"step": 3})
    assert records.evaluated_report(tmp_path, 3) == tmp_path


# The environment


def test_the_environment_has_no_secrets(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_from_env")
    argv = ["train.py", "--hub.token", "hf_a", "--wandb-api-key=hf_b", "--lr", "2e-4", "--password", "--path", "a b"]
    monkeypatch.setattr(sys, "argv", argv)
    facts = environment.describe_environment(accelerator)
    assert "hf_" not in json.dumps(records.plain(facts))
    assert facts["command"] == "train.py --hub.token '***' '--wandb-api-key=***' --lr 2e-4 --password --path 'a b'"
    assert (facts["world_size"], facts["strategy"], facts["precision"]) == (1, "single", "fp32")
    assert facts["device"] == "cpu"
    assert facts["cpu_count"] == os.cpu_count()
    assert (
        facts["versions"]["torch"] == torch.__version__.split("+")[0] or facts["versions"]["torch"] == torch.__version__
    )  # type: ignore[index]
    installed = {name for name in environment.PACKAGES if find_spec(name)}
    assert installed <= facts["versions"].keys()  # type: ignore[attr-defined]


def test_only_options_named_like_secrets_are_hidden() -> None:
    for name in (
        "hub_token",
        "api_token",
        "hub.token",
        "token-file",
        "api_key",
        "wandb_apikey",
        "db-password",
        "SECRET",
    ):
        assert environment.command_line(["r.py", f"--{name}", "a"]) == f"r.py --{name} '***'"
    for name in (
        "data.tokenizer",
        "evaluation.max_new_tokens",
        "model.max_tokens",
        "prompt_tokens",
        "monkey",
        "passes",
    ):
        assert environment.command_line(["r.py", f"--{name}", "a"]) == f"r.py --{name} a"


def test_git_commit_of_the_script(tmp_path: Path) -> None:
    assert environment.git_commit(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-qm", "one")
    git("tag", "-am", "release", "v1")
    commit = git("rev-parse", "HEAD")
    assert environment.git_commit(tmp_path) == commit
    (tmp_path / "a.py").write_text("2")
    assert environment.git_commit(tmp_path) == f"{commit}-dirty"


def test_git_commit_is_that_of_the_recipe(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the program that runs it: a notebook's is none of the user's."""
    asked: list[Path] = []
    monkeypatch.setattr(environment, "git_commit", asked.append)
    for recipe in ("/somewhere/recipes/r.py", None):
        monkeypatch.setattr(exiting, "recipe_file", lambda recipe=recipe: recipe)
        environment.describe_environment(accelerator)
    assert asked == [Path("/somewhere/recipes"), Path.cwd()]


def test_the_schema_is_documented(accelerator: Accelerator) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    meter = Throughput(torch.device("cpu"), peak_flops_per_second=1.0)
    meter.update(samples=1, tokens=1, flops=1)
    names = {*records.EVENTS, *records.TRAIN_FIELDS, *records.NON_FINITE, *meter.read(), *trackers.INSTALL}
    names |= {query.name for query in gpu_figures.QUERIES}
    names |= {
        "gpu_throttled",
        "allocator_retries",
        "memory_allocated_gib",
        "memory_reserved_gib",
        "memory_peak_gib",
        "time",
        "elapsed_seconds",
        "processor_seconds",
    }
    names |= set(environment.describe_environment(accelerator))
    assert [name for name in sorted(names) if f"`{name}`" not in page and f'`"{name}"`' not in page] == []


# Trackers


def test_an_unknown_tracker_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"'tensorbord'.*did you mean 'tensorboard'\?.*wandb"):
        trackers.resolve_trackers(("tensorbord",))
    with pytest.raises(UsageError, match="'all' is not a tracker"):
        trackers.resolve_trackers(("all",))


def test_a_tracker_that_is_not_installed_is_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    available = {str(t) for t in get_available_trackers()}
    missing = sorted(set(trackers.INSTALL) - available)
    assert missing, "every tracker is installed here: nothing to test"
    for name in missing:
        with pytest.raises(UsageError, match=re.escape(f"pip install {trackers.INSTALL[name]}")):
            trackers.resolve_trackers((name,))
    with pytest.raises(UsageError, match="pip install"):
        Recorder(accelerator, tmp_path, LogConfig(trackers=(missing[0],)), max_steps=10)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_extras_named_in_messages_exist() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    named = re.findall(r"accel-train\[(\w+)\]", " ".join(trackers.INSTALL.values()))
    assert len(named) == 5
    assert set(named) <= set(project["optional-dependencies"])
    assert set(trackers.INSTALL) == set(LOGGER_TYPE_TO_CLASS)


def test_losses_of_different_kinds_are_series_of_their_own(accelerator: Accelerator, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = LogConfig(trackers=("tensorboard",), project="p", progress_bar="off")
    labels = progress.Labels(loss_of="mode")
    with Recorder(accelerator, tmp_path, options, max_steps=40, labels=labels) as recorder:
        for step, mode in ((10, "l2t"), (20, "t2l"), (30, "l2t")):
            more = {"mode": mode, "loss_text": 1.0, "loss_at_0.25": 2.0, "grad_norm_layers": 3.0, "train_share": 0.5}
            recorder.train(step, FIELDS | {"loss": float(step)} | more)
    events = EventAccumulator(str(tmp_path / "trackers" / "p")).Reload()
    series = {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    for name in ("loss", "loss_text", "grad_norm", "grad_norm_layers", "train_share"):
        assert (series[f"train/{name}_l2t"], series[f"train/{name}_t2l"]) == ([10, 30], [20]), name
        assert f"train/{name}" not in series
    assert series["train/lr"] == series["train/loss_at_0.25"] == [10, 20, 30]


def test_nested_config_and_values_reach_tensorboard(accelerator: Accelerator, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {"seed": 0, "optimizer": {"lr": 2e-4, "betas": (0.9, 0.95), "name": None}, "path": Path("a")}
    options = LogConfig(trackers=("tensorboard", "tensorboard"), project="p", progress_bar="off")
    with Recorder(accelerator, tmp_path, options, max_steps=100, config=config) as recorder:
        for step in (10, 20):
            recorder.train(step, FIELDS | {"loss": 1 / step, "mode": "l2t"})
        recorder.evaluation(20, {"l2t_nll": 3.0})
    assert accelerator.trackers == []  # finished once: accelerator.end_training has nothing left
    events = EventAccumulator(str(tmp_path / "trackers" / "p")).Reload()
    losses = events.Scalars("train/loss")
    assert [(e.step, e.value) for e in losses] == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))]
    assert events.Scalars("evaluation/l2t_nll")[0].value == 3.0
    stored = next(tmp_path.glob("trackers/p/*/hparams.yml")).read_text()
    assert "optimizer.lr: 0.0002" in stored
    assert "optimizer.betas: '[0.9, 0.95]'" in stored


@pytest.fixture
def broken_tracker() -> Iterator[type[GeneralTracker]]:
    class Broken(GeneralTracker):
        name = "broken"
        requires_logging_directory = False
        bad_steps: tuple[int, ...] = ()
        bad_start = False
        seen: list[int]

        def __init__(self, run_name: str) -> None:
            super().__init__()
            self.run_name = run_name
            type(self).seen = []

        @property
        def tracker(self) -> None:
            return None

        def start(self) -> None:
            if self.bad_start:
                raise ConnectionError("no route")

        def log(self, values: dict[str, float], step: int | None = None, **kwargs: object) -> None:
            self.seen.append(step or 0)
            if step in self.bad_steps:
                raise ConnectionError("gone")

        def finish(self) -> None:
            raise ConnectionError("gone at the end as well")

    register_tracker_class(Broken)
    yield Broken
    LOGGER_TYPE_TO_CLASS.pop("broken")


def run_with_broken(accelerator: Accelerator, folder: Path, steps: range) -> list[int]:
    compiling.skip_without("tensorboard")
    options = LogConfig(log_every=1, trackers=("broken", "tensorboard"), progress_bar="off")
    with Recorder(accelerator, folder, options, max_steps=100) as recorder:
        for step in steps:
            recorder.train(step, FIELDS)
    return [r["step"] for r in read_metrics(folder / "metrics.jsonl") if r["event"] == "train"]


def test_a_failing_tracker_is_switched_off_with_one_warning(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture, broken_tracker: type[GeneralTracker]
) -> None:
    broken_tracker.bad_steps = tuple(range(3, 100))  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        assert run_with_broken(accelerator, tmp_path, range(1, 11)) == list(range(1, 11))
    assert broken_tracker.seen == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    warnings = [r.getMessage() for r in caplog.records if "broken" in r.getMessage()]
    assert len(warnings) == 1
    assert "3 times in a row" in warnings[0]
    assert "gone" in warnings[0]


def test_a_tracker_that_recovers_is_kept(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture, broken_tracker: type[GeneralTracker]
) -> None:
    broken_tracker.bad_steps = (2, 3, 5, 6)  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        run_with_broken(accelerator, tmp_path, range(1, 9))
    assert broken_tracker.seen == list(range(1, 9))  # type: ignore[attr-defined]
    assert [r.getMessage() for r in caplog.records] == [
        "tracker broken did not finish: ConnectionError: gone at the end as well"
    ]


def test_a_tracker_that_cannot_start_stops_the_run(
    accelerator: Accelerator, tmp_path: Path, broken_tracker: type[GeneralTracker]
) -> None:
    compiling.skip_without("tensorboard")
    broken_tracker.bad_start = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"broken.*could not start.*no route"):
        run_with_broken(accelerator, tmp_path, range(1, 2))


# The recorder


def run(accelerator: Accelerator, folder: Path, start: int, stop: int) -> list[dict[str, object]]:
    options = LogConfig(progress_bar="off")
    with Recorder(accelerator, folder, options, max_steps=60, start_step=start, config={"seed": 0}) as recorder:
        for step in range(start + 1, stop + 1):
            recorder.advance(step)
            if recorder.due(step):
                recorder.train(step, FIELDS | {"loss": float(step), "attempt": start, "step": -1, "event": "x"})
            if step % 20 == 0:
                recorder.evaluation(step, {"l2t_nll": 1.0})
                recorder.record("checkpoint", {"path": "c"}, step=step)
    return read_metrics(folder / "metrics.jsonl")


def test_a_resumed_run_has_each_step_once(accelerator: Accelerator, tmp_path: Path) -> None:
    first = run(accelerator, tmp_path, 0, 35)
    assert [r["event"] for r in first[:3]] == ["environment", "config", "train"]
    assert first[0]["command"]
    assert first[1]["config"] == {"seed": 0}
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "tra')
    both = run(accelerator, tmp_path, 20, 60)
    train = [(r["step"], r["attempt"], r["loss"]) for r in both if r["event"] == "train"]
    assert train == [(1, 0, 1.0), (10, 0, 10.0), (20, 0, 20.0)] + [(s, 20, float(s)) for s in (30, 40, 50, 60)]
    assert [r["step"] for r in both if r["event"] == "evaluation"] == [20, 40, 60]
    assert [(r["event"], r["step"]) for r in both if r["event"] in ("resume", "end")] == [
        ("end", 35),
        ("resume", 20),
        ("end", 60),
    ]
    assert [r["event"] for r in both].count("environment") == 2
    times = [r["elapsed_seconds"] for r in both if r["event"] == "train" and r["attempt"] == 20]
    assert all(r["time"] > 1.6e9 for r in both)
    assert times == sorted(times)


def test_log_points_are_a_function_of_the_step(accelerator: Accelerator, tmp_path: Path) -> None:
    for start in (0, 7):
        recorder = Recorder(accelerator, tmp_path, LogConfig(log_every=5), max_steps=17, start_step=start)
        assert [s for s in range(1, 18) if recorder.due(s)] == [1, 5, 10, 15, 17]
        recorder.close()


def test_a_training_line_that_lacks_a_field_is_the_recipes_mistake(accelerator: Accelerator, tmp_path: Path) -> None:
    with Recorder(accelerator, tmp_path, LogConfig(), max_steps=10) as recorder:
        for name in records.TRAIN_FIELDS:
            with pytest.raises(ValueError, match=f"lacks {name};"):
                recorder.train(10, {k: v for k, v in FIELDS.items() if k != name})
        with pytest.raises(ValueError, match="'trian' is not in the schema"):
            recorder.record("trian")


def test_a_field_of_a_recipe_does_not_replace_one_of_the_line(accelerator: Accelerator, tmp_path: Path) -> None:
    with Recorder(accelerator, tmp_path, LogConfig(), max_steps=10) as recorder:
        for name in ("loss", "lr", "step", "gpu_utilization"):
            with pytest.raises(UsageError, match=rf"report\(\.\.\., {name}=\.\.\.\): .* such as my_{name}"):
                recorder.train(10, FIELDS | {"loss": 1.0}, {"mode": "l2t", name: 3})
        recorder.train(10, FIELDS | {"loss": 1.0}, {"mode": "l2t"})
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["event"] == "train"]
    assert [(line["step"], line["loss"], line["mode"]) for line in lines] == [(10, 1.0, "l2t")]


def test_a_full_disk_does_not_stop_training(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = LogConfig(progress_bar="off")
    with (
        caplog.at_level(logging.WARNING),
        Recorder(accelerator, tmp_path, options, max_steps=10) as recorder,
    ):
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        for step in range(1, 6):
            recorder.train(step, FIELDS)
    assert len(caplog.records) == 1


WORKER = """
import sys, time
from pathlib import Path
from accelerate import Accelerator
from accel_train.metrics.logs import setup_logging
from accel_train.metrics.progress import LogConfig
from accel_train.metrics.recorder import Recorder
from accel_train.metrics.throughput import Throughput
folder, fields = Path(sys.argv[1]), eval(sys.argv[2])
accelerator = Accelerator(cpu=True)
with setup_logging(folder, accelerator.process_index, accelerator.num_processes):
    with Recorder(accelerator, folder, LogConfig(log_every=2, trackers=("tensorboard",)), max_steps=4) as recorder:
        for step in range(1, 5):
            recorder.advance(step)
            if recorder.due(step):
                recorder.train(step, fields)
        recorder.evaluation(4, {"l2t_nll": 1.0})
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        raise RuntimeError("only on rank 1")
"""


@pytest.mark.distributed
def test_only_the_main_process_writes(tmp_path: Path) -> None:
    compiling.skip_without("tensorboard")
    processes, port = [], free_port()
    for rank in range(2):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        variables = {k: str(v) for k, v in names.items()} | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        path = str(Path(__file__).parents[2])
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(tmp_path), repr(FIELDS)],
                env=os.environ | variables | {"PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [p.communicate(timeout=PATIENCE_SECONDS) for p in processes]
    assert [p.returncode for p in processes] == [0, 1], outputs
    events = [r["event"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert events == ["environment", "train", "train", "train", "evaluation", "end"]
    facts = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert (facts["world_size"], facts["strategy"]) == (2, "ddp")
    assert "step 4/4  loss 3.412" in outputs[0][0]
    assert outputs[1][0] == ""
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in range(2)]
    assert "rank 0 of 2" in logs[0]
    assert "step 4/4" in logs[0]
    assert "Traceback" not in logs[0]
    assert "rank 1 of 2" in logs[1]
    assert "RuntimeError: only on rank 1" in logs[1]
    assert "step 4/4" not in logs[1]
    assert "RuntimeError: only on rank 1" in outputs[1][1]
    assert len(list(tmp_path.glob("trackers/accel_train/events*"))) == 1


# Progress


def test_plain_lines_where_there_is_no_terminal(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="accel_train"):
        bar = progress.Progress("auto", 1500, 0)
        bar.advance(120)
        bar.show(120, FIELDS)
        bar.close()
    assert caplog.messages == ["step 120/1500  loss 3.412  lr 1.2e-3  412 samples/s  ETA 1:32"]
    assert not getattr(caplog.records[0], FILE_ONLY)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["mode", "task"])
def test_a_loss_says_of_what_it_is(name: str) -> None:
    assert progress.describe(FIELDS | {name: "l2t"}, name) == ["loss 3.412 (l2t)", "lr 1.2e-3", "412 samples/s"]


def test_several_terms_of_a_loss_are_shown_and_a_single_one_is_not() -> None:
    one = FIELDS | {"loss_text": 3.412}
    assert progress.describe(one) == ["loss 3.412", "lr 1.2e-3", "412 samples/s"]
    by_time = {"loss_loss": 3.412, "loss_at_0.00": 4.0, "loss_at_0.25": 3.0}
    assert progress.describe(FIELDS | by_time) == ["loss 3.412", "lr 1.2e-3", "412 samples/s"]
    two = one | {"loss_latent": 0.5}
    assert progress.describe(two) == ["loss 3.412", "text 3.412", "latent 0.5000", "lr 1.2e-3", "412 samples/s"]


@pytest.mark.parametrize("own_summary", [True, False])
def test_an_evaluation_is_on_the_console_once(
    own_summary: bool, accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = progress.Labels(own_summary=own_summary)
    with caplog.at_level(logging.INFO, logger="accel_train"):
        log = Recorder(accelerator, tmp_path, LogConfig(), max_steps=4, labels=labels)
        log.evaluation(4, {"accuracy": 0.5})
        log.close()
    line = next(record for record in caplog.records if "evaluation at step 4" in record.getMessage())
    assert "accuracy 0.5" in line.getMessage()
    assert getattr(line, FILE_ONLY) is own_summary


def test_a_bar_keeps_its_lines_off_the_console(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="accel_train"):
        bar = progress.Progress("on", 1500, 100)
        bar.show(120, FIELDS)
        bar.close()
    assert getattr(caplog.records[0], FILE_ONLY)
    drawn = capsys.readouterr().err
    # As in a log line: of training alone, whatever else has passed since.
    assert re.search(r"120/1500 \[\d+:\d\d, 1:32 left  loss", drawn)
    assert "100/1500" in drawn
    assert "120/1500" in drawn
    assert "loss 3.412  lr 1.2e-3  412 samples/s" in drawn


def on_a_terminal(rows: int, columns: int) -> str:
    """What a person sees of a progress, on a real pseudo-terminal of that size."""
    code = (
        "import logging, sys; from accel_train.metrics.progress import Progress; "
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout); "
        "p = Progress('auto', 40, 0); p.show(7, {'loss': 1.0}); p.close()"
    )
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], stdout=terminal, stderr=terminal, check=True, env=environ)
    os.write(terminal, b"end")
    seen = b""
    while b"end" not in seen:
        seen += os.read(controller, 4096)
    os.close(controller)
    os.close(terminal)
    return seen.decode()


def test_a_terminal_gets_a_bar_unless_it_has_no_size() -> None:
    assert "| 7/40 [" in on_a_terminal(24, 100)
    for size in ((24, 0), (0, 100)):
        seen = on_a_terminal(*size)
        assert "step 7/40  loss 1.000" in seen
        assert "| 7/40 [" not in seen


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.2e-3, "1.2e-3"), (0.0, "0"), (1e-4, "1e-4"), (3.14159, "3.14e0"), (1e-10, "1e-10"), (math.nan, "nan")],
)
def test_short_exponent(value: float, text: str) -> None:
    assert progress.short_exponent(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (92, "1:32"),
        (7384, "2:03:04"),
        (86400 + 61, "1 day 0:01:01"),
        (3 * 86400, "3 days 0:00:00"),
        (9999 * 86400 - 1, "9998 days 23:59:59"),
        (2.0**53, "over 9999 days"),
        (float("inf"), "over 9999 days"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert progress.format_seconds(seconds) == text


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_step_time_that_is_not_finite_leaves_no_time(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    bar = progress.Progress("off", 1500, 0)
    with caplog.at_level(logging.INFO):
        bar.show(100, {"loss": 1.0, "step_seconds": 0.5})
        bar.show(101, {"loss": 1.0, "step_seconds": seconds})
    assert caplog.messages == ["step 100/1500  loss 1.000  ETA 11:40", "step 101/1500  loss 1.000"]


def test_importing_metrics_is_light() -> None:
    """Reading a run needs neither torch nor matplotlib; only Throughput imports torch."""
    code = (
        "import sys; import accel_train.metrics.recorder, accel_train.metrics.curves, accel_train.metrics.logs; "
        "print([m for m in ('torch', 'accelerate', 'matplotlib', 'tqdm', 'tensorboard') if m in sys.modules])"
    )
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.strip() == "[]"


def test_the_report_is_written_after_its_evaluation(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        recorder, "plot_curves", lambda metrics, _: seen.extend(r["event"] for r in read_metrics(metrics))
    )
    with Recorder(accelerator, tmp_path, LogConfig(progress_bar="off"), max_steps=5) as log:
        log.evaluation(3, {"nll": 1.5})
    assert seen[-1] == "evaluation"  # so the picture has it
    assert json.loads((tmp_path / "report" / "evaluation.json").read_text()) == {"step": 3, "nll": 1.5}


def test_samples_of_each_evaluation_are_kept_and_those_of_a_left_training_go(tmp_path: Path) -> None:
    for step in (100, 200, 300, 150):  # resumed from 100
        write_samples(tmp_path, ["a"], [f"b{step}"], [("c", 0.5)], step)
    assert [page.name for page in sorted((tmp_path / "samples").iterdir())] == ["step_00000100.md", "step_00000150.md"]
    assert (tmp_path / "samples.md").read_text() == (tmp_path / "samples" / "step_00000150.md").read_text()
    assert "b100" in (tmp_path / "samples" / "step_00000100.md").read_text()


def test_samples_that_cannot_be_written_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    write_samples(tmp_path / "file" / "report", ["a"], ["b"], [("c", 0.5)], 3)
    assert "could not be written" in caplog.text
