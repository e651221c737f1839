"""Shares of a profile against figures computed by hand, and the profile of a real run."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity

from accel_train.config import UsageError
from accel_train.data.loader import StepBatches
from accel_train.metrics.profiling import intervals, shares
from accel_train.metrics.profiling.advice import Setting, advise
from accel_train.metrics.profiling.names import DATA_WAIT, PAUSE, STEP
from accel_train.metrics.profiling.options import ProfileConfig, StepRange
from accel_train.metrics.profiling.shares import Event, Shares, measure
from accel_train.metrics.profiling.summary import summarise
from accel_train.metrics.records import read_metrics
from accel_train.metrics.throughput import Throughput
from tests.metrics.test_throughput import CPU, Clock, train
from tests.zygote import run

OPTIONS = {"compile.mode": "off", "precision": "fp32", "distributed.comm_hook": "none"}


def span(category: str, name: str, start: float, end: float) -> Event:
    """An event from ``start`` to ``end`` in microseconds."""
    return Event(name, category, start, (end - start) / 1e6)


def setting(directory: Path, **changed: object) -> Setting:
    values: dict[str, object] = {
        "recipe": "recipes/mmdit.py",
        "directory": directory,
        "options": OPTIONS,
        "micro_batch_size": 4,
        "accumulation_steps": 1,
        "num_workers": 0,
        "world_size": 1,
    }
    return Setting(**(values | changed))  # type: ignore[arg-type]


def test_interval_sets_agree_with_sets_of_points() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[tuple[float, float]]:
        pairs = torch.randint(0, 60, (6, 2), generator=generator).tolist()
        return [(float(min(pair)), float(max(pair))) for pair in pairs]

    def points(spans: list[tuple[float, float]]) -> set[int]:
        return {point for start, end in spans for point in range(int(start), int(end))}

    for _ in range(200):
        a, b = draw(), draw()
        first, second = intervals.merge(a), intervals.merge(b)
        assert all(x[1] < y[0] for x, y in itertools.pairwise(first))
        assert points(first) == points(a)
        assert points(intervals.intersect(first, second)) == points(a) & points(b)
        assert points(intervals.subtract(first, second)) == points(a) - points(b)
        assert intervals.length(first) == len(points(a))


def test_shares_of_a_gpu() -> None:
    """Two steps of 100 us each, of which 50 are an evaluation, so 150 us count."""
    events = [
        span("user_annotation", STEP, 0, 100),
        span("user_annotation", STEP, 100, 200),
        span("user_annotation", PAUSE, 150, 200),
        span("user_annotation", DATA_WAIT, 0, 10),
        # The GPU still computes for 5 us of the wait.
        span("kernel", "sm90_xmma_gemm_bf16bf16", -20, 5),
        span("kernel", "void at::native::elementwise_kernel", 20, 40),
        span("kernel", "nvjet_tst_128x128", 30, 60),
        span("kernel", "ncclDevKernel_AllReduce_Sum_bf16", 50, 90),
        span("gpu_memcpy", "Memcpy HtoD", 80, 100),
        span("kernel", "flash_fwd_kernel", 110, 130),
        # In the evaluation, and on the host: neither counts.
        span("kernel", "ampere_sgemm", 160, 170),
        span("cpu_op", "aten::mm", 100, 150),
    ]
    found = measure(events)
    microseconds = {name: share * 150 for name, share in found.parts.items()}
    expected = {"compute": 55, "memory-bound operators": 30, "communication": 20, "data wait": 5, "idle": 40}
    assert microseconds == pytest.approx(expected)
    assert sum(found.parts.values()) == pytest.approx(1.0)
    assert (found.steps, found.on_device) == (2, True)
    assert found.seconds == pytest.approx(150e-6)


def test_shares_of_a_cpu() -> None:
    events = [
        span("user_annotation", STEP, 0, 100),
        span("user_annotation", DATA_WAIT, 0, 20),
        span("cpu_op", "aten::stack", 5, 15),
        span("cpu_op", "aten::linear", 20, 60),
        span("cpu_op", "aten::addmm", 25, 55),
        # Hidden by the product for 15 us.
        span("user_annotation", "gloo:all_reduce", 40, 70),
        span("cpu_op", "aten::add_", 80, 85),
    ]
    found = measure(events)
    expected = {
        "data wait": 0.2,
        "compute": 0.3,
        "communication": 0.15,
        "other operators": 0.1,
        "outside operators": 0.25,
    }
    assert found.parts == pytest.approx(expected)
    assert not found.on_device


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>", "compute"),
        ("triton_tem_fused_mm_3", "compute"),
        ("triton_tem_fused_flex_attention_0", "compute"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_transpose_3", "memory-bound operators"),
        ("triton_red_fused_convolution_native_layer_norm_2", "memory-bound operators"),
        ("triton_poi_fused_add_gelu_1", "memory-bound operators"),
        ("void at::native::convert_kernel<float>", "memory-bound operators"),
        ("implicit_convolve_sgemm", "compute"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
    ],
)
def test_kernels_belong_to_their_part(name: str, part: str) -> None:
    found = measure([span("user_annotation", STEP, 0, 10), span("kernel", name, 0, 10)])
    assert found.parts[part] == pytest.approx(1.0)


def test_advice_names_the_largest_parts_first_with_its_command(tmp_path: Path) -> None:
    parts = {shares.COMPUTE: 0.3, shares.MEMORY: 0.15, shares.COMMUNICATION: 0.2, shares.WAIT: 0.25, shares.IDLE: 0.1}
    found = Shares(1.0, 10, True, parts)
    given = advise(found, setting(tmp_path, num_workers=2, accumulation_steps=4, world_size=8))
    assert [each.vary for each in given] == ["precision=fp32,bf16", "loader.num_workers=2,4", "compile.mode=off,on"]
    assert given[1].command(setting(tmp_path)) == (
        f"accel-train compare recipes/mmdit.py {tmp_path}/config.yaml --vary loader.num_workers=2,4 --max_steps 60"
    )
    # What is on already, or would reduce nothing, is not advised.
    settled = OPTIONS | {"compile.mode": "on", "precision": "bf16"}
    given = advise(found, setting(tmp_path, options=settled, world_size=8))
    assert [each.vary for each in given] == ["loader.num_workers=0,1", "distributed.comm_hook=none,bf16"]
    assert "20%" in given[1].reason
    small = Shares(1.0, 10, True, {shares.COMPUTE: 0.97, shares.MEMORY: 0.03})
    assert advise(small, setting(tmp_path, options=settled)) == []
    assert "No option" in "\n".join(summarise(StepRange(0, 10), small, [], setting(tmp_path)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("20:10", "10 is not larger than 20"),
        ("5:5", "5 is not larger than 5"),
        ("-1:5", "two numbers of steps"),
        ("10", "two numbers of steps"),
        ("a:b", "two numbers of steps"),
    ],
)
def test_what_is_no_range_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ProfileConfig(text)


def test_a_range_beyond_the_run_is_refused() -> None:
    ProfileConfig("10:20").refuse_beyond(20)
    ProfileConfig().refuse_beyond(1)
    with pytest.raises(UsageError, match="max_steps 19, so STOP can be at most 19"):
        ProfileConfig("10:20").refuse_beyond(19)


def test_profiled_intervals_are_left_out_of_the_throughput_and_marked() -> None:
    clock = Clock()
    meter = Throughput(CPU, clock=clock)
    train(meter, clock, 2, 9.0, profiled=True)
    only = meter.read()
    assert (only["step_seconds"], only["profiled_steps"]) == (9.0, 2)  # nothing else has been measured
    train(meter, clock, 4, 1.0)
    later = meter.read()
    assert later["step_seconds"] == pytest.approx(1.0)
    assert "profiled_steps" not in later
    train(meter, clock, 3, 5.0, profiled=True)
    marked = meter.read()
    assert marked["step_seconds"] == pytest.approx(1.0)
    assert marked["samples_per_second"] == pytest.approx(8.0)
    assert marked["profiled_steps"] == 3


def test_a_resume_past_the_range_starts_no_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accel_train.metrics.profiling import profiler

    started: list[str] = []

    def refuse(device: torch.device) -> None:
        started.append(str(device))
        raise RuntimeError("a profiler was started")

    monkeypatch.setattr(profiler, "_profiler", refuse)
    throughput = Throughput(CPU)

    def steps(first: int) -> Generator[StepBatches]:
        yield from (StepBatches(step, [], 0.0) for step in range(first, 12))

    wanted = StepRange(2, 4)
    passed = profiler.profiled(steps(4), wanted, setting(tmp_path), 4, CPU, throughput.pause)
    assert [batches.done for batches in passed] == list(range(5, 13))
    assert started == []
    with pytest.raises(RuntimeError, match="started"):  # within the range it is
        list(profiler.profiled(steps(3), wanted, setting(tmp_path), 3, CPU, throughput.pause))


def test_a_trace_that_is_cut_off_costs_the_profile_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk leaves a part of it: torch writes the trace in C++ and does not look."""
    from accel_train.metrics.profiling import profiler

    class CutOff(profiler.profile):
        def export_chrome_trace(self, path: str) -> None:
            super().export_chrome_trace(path)
            text = gzip.decompress(Path(path).read_bytes())
            Path(path).write_bytes(gzip.compress(text[: len(text) // 2]))

    monkeypatch.setattr(profiler, "_profiler", lambda _: CutOff(activities=[ProfilerActivity.CPU], acc_events=True))
    pause = Throughput(CPU).pause
    steps = (StepBatches(step, [], 0.0) for step in range(3))
    measured = profiler.profiled(steps, StepRange(0, 2), setting(tmp_path), 0, CPU, pause)
    assert [batches.done for batches in measured] == [1, 2, 3]
    assert "the profile could not be written" in caplog.text
    assert list((tmp_path / "report").iterdir()) == []


def train_mmdit(directory: Path, *flags: str) -> str:
    """Run the recipe at a tiny size and return its output."""
    words = ["recipes/mmdit.py", "demo", "--smoke", "--output_dir", str(directory), "--log.log_every", "1"]
    words += ["--model.width", "32", "--model.depth", "1", "--model.heads", "2"]
    done = run([sys.executable, *words, *flags])
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow  # its parts are tested above, on events made by hand
def test_a_run_writes_its_profile_and_a_resume_past_it_none(tmp_path: Path) -> None:
    directory = tmp_path / "a run"
    output = train_mmdit(directory, "--max_steps", "4", "--profile.steps", "1:3")
    assert "profile of steps 2 to 3: data wait" in output
    report = directory / "report"
    with gzip.open(report / "profile_trace.json.gz", "rt") as file:
        trace = json.load(file)
    found = measure(shares.events_of(trace))
    assert found.steps == 2
    assert found.parts["compute"] > 0.01
    assert sum(found.parts.values()) == pytest.approx(1.0)
    table = (report / "profile_operators.txt").read_text().splitlines()
    top = [line.split()[0] for line in table[3:18]]
    assert {"aten::mm", "aten::addmm", "aten::bmm"} & set(top), top
    page = (report / "profile.md").read_text()
    assert page.startswith("# Profile of steps 2 to 3\n")
    assert "--vary compile.mode=off,on" in page
    lines = {r["step"]: r for r in read_metrics(directory / "metrics.jsonl") if r["event"] == "train"}
    assert {step for step, line in lines.items() if "profiled_steps" in line} == {2, 3}
    for line in lines.values():
        parts = [line[f"{part}_fraction"] for part in ("forward", "backward", "update", "data_wait")]
        assert min(parts[:3]) > 0
        # What is left is neither: on these lines the profiler itself, mostly.
        assert sum(parts) < 1.001

    before = (report / "profile.md").stat().st_mtime_ns
    output = train_mmdit(directory, "--max_steps", "5", "--overwrite", "False", "--profile.steps", "1:3")
    assert "profile of steps" not in output
    assert (report / "profile.md").stat().st_mtime_ns == before
    assert yaml.safe_load((directory / "config.yaml").read_text())["profile"] == {"steps": "1:3", "memory": False}
