"""The suite's method, its page, and every script at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accel_train.options.strict_yaml import read_yaml
from accel_train.options.tree import flatten
from accel_train.training.optimizer_classes.fused_adamw import FusedAdamW
from benchmarks import ablation, gemm, gpu, gpu_parts, gpu_saving, gpu_training, muon, performance_page
from benchmarks.device import TINY, Machine
from benchmarks.gpu_contenders import Found
from benchmarks.method import RESULTS, ROOT, Row, in_turns, line, row, write_results
from benchmarks.reads import HostReads
from benchmarks.sd3 import SD3, Shape, batch_of, copy_model, diffusers_model, loss_sum, theirs_call
from benchmarks.suite import JOBS
from tests import compiling, zygote
from tests.distributed.launching import environment

IN_PROCESS = {
    "loop": "C1",
    "mmdit_block": "C2",
    "optimizer": "C3",
    "activation_checkpointing": "C5",
    "gemm": "C9",
    "rng": "rng",
}
"""Scripts that a test can run without a process of its own, and the row that they fill."""
LONG = {
    "checkpoint": "C4",
    "compile": "C6",
    "data_loading": "C7",
    "accumulation": "C8",
    "exchange": "C10",
    "scaling": "scaling",
    "pictures": "pictures",
    "causal_lm": "causal_lm",
    "startup": "startup",
    "host_weights": "host_weights",
    "reporting": "reporting",
    "demo_steps": "demo_steps",
}
SMALL = Shape(64, 3, head_width=16, side=8, text_tokens=5, batch=2, text_width=24, pooled_width=12, channels=4)


# --------------------------------------------------------------------------------------------------------- the method
@pytest.mark.parametrize(
    ("values", "target", "verdict"),
    [
        ([4.6, 4.7, 4.8, 4.9, 5.0], ">= 4.5", "passed"),
        ([4.0, 4.3, 4.5, 4.7, 5.0], ">= 4.5", "not decided"),
        ([4.0, 4.1, 4.2, 4.3, 4.4], ">= 4.5", "FAILED"),
        ([4.0, 4.1, 4.2], None, "reported"),
        (0, "<= 0", "passed"),
        (1, "<= 0", "FAILED"),
    ],
)
def test_a_target_is_missed_only_where_the_interval_misses_it(values: Any, target: str | None, verdict: str) -> None:
    found = row("C3", "speed", values, "x", target)
    assert found.verdict == verdict
    assert (found.interval is None) == isinstance(values, int)
    assert verdict in line(found)


def test_a_goal_is_no_target() -> None:
    found = row("C2", "speed", [1.01, 1.02, 1.03], "x", ">= 1", ">= 1.05")
    assert (found.verdict, found.goal_verdict) == ("passed", "not reached")
    only = row("C1", "cost", [40.0, 50.0], "us", goal="<= 60")
    assert (only.verdict, only.goal_verdict) == ("reported", "reached")


def test_ways_take_turns_and_warm_up_is_left_out() -> None:
    order: list[str] = []
    clock = iter(range(1000))
    ways = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    found = in_turns(ways, 3, repeats=2, warm_up=1, clock=lambda: float(next(clock)))
    assert order == ["a", "a", "b", "b"] * 4
    assert found.of == 3
    assert set(found.seconds["a"]) == {0.5}
    assert found.ratios("a", "b") == [1.0] * len(found.seconds["a"])


def test_a_disturbed_round_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import method

    def run(probes: list[float]) -> list[float]:
        """Rounds kept, where the probe before and after each takes this long."""
        after = [p for p in probes for _ in range(2)]
        times: Iterator[float] = iter([0.0, *after])  # the first warms the probe up
        works = iter(range(100))

        def seconds_of(work: Any, clock: Any = None, repeats: int = 1) -> float:
            return float(next(works)) if clock is not None else next(times)

        monkeypatch.setattr(method, "seconds_of", seconds_of)
        return method.in_turns({"a": lambda: None}, len(probes), warm_up=0).seconds["a"]

    assert run([1.0, 1.05, 1.5, 1.0, 0.9]) == [0.0, 1.0, 3.0, 4.0]
    assert run([1.0, 5.0, 1.0, 5.0]) == [0.0, 2.0]


def test_reads_are_counted_once_each_whatever_their_form() -> None:
    x = torch.arange(4.0)
    with HostReads() as reads:
        (x + 1).sum()
        x.clone().copy_(x)
        assert not reads.counts
        x[0].item()
        x.tolist()
        x.cpu()
        x.numpy()
        float(x[1])
        int(x[1])
        if x[2] > 1:
            pass
        torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(x)], 1.0)
    expected = {"item": 1, "tolist": 1, "cpu": 1, "numpy": 1, "__float__": 1, "__int__": 1, "__bool__": 1}
    assert reads.counts == expected


def test_a_read_below_python_is_counted() -> None:
    with HostReads() as reads:
        torch.add(torch.ones(3), torch.ones(3), alpha=torch.tensor(2.0))  # torch makes a number of it
    assert reads.counts == {"_local_scalar_dense": 1}


# ----------------------------------------------------------------------------------------------------------- the page
def results(folder: Path, *rows: Row, name: str = "some") -> Path:
    write_results(folder / f"{name}.json", "C2: the block", rows, {}, {"a peer": "not installed"})
    return folder


def test_the_page_is_what_the_results_say() -> None:
    """Where this fails: python -m benchmarks.performance_page"""
    command = [sys.executable, "-m", "benchmarks.performance_page", "--check"]
    done = zygote.run(command, env=environment())
    assert done.returncode == 0, done.stdout


def test_a_changed_figure_changes_the_page(tmp_path: Path) -> None:
    found = row("C2", "speed over a peer", [1.06, 1.07, 1.08], "x", ">= 1", ">= 1.05")
    text = performance_page.page(results(tmp_path, found))
    assert "| speed over a peer | 1.07 x | 1.06 to 1.08 | >= 1 x, goal >= 1.05 x | passed, goal reached |" in text
    assert "| C2: The MMDiT block against diffusers' | 1 | 0 | 0 | 0 |" in text
    assert "absent: a peer (not installed)" in text
    assert "; `python" in text  # the command that made it
    other = performance_page.page(results(tmp_path, replace(found, value=1.2)))
    assert other != text
    assert "1.2 x" in other


def test_a_missed_target_shows_and_what_was_not_run_says_so(tmp_path: Path) -> None:
    text = performance_page.page(results(tmp_path, row("C5", "full: time", [2.0, 2.1], "x", "<= 1.36")))
    assert "| full: time | 2.05 x | 2 to 2.1 | <= 1.36 x | **FAILED** |" in text
    sections = {part.splitlines()[0].strip("# "): part for part in text.split("\n## ")[1:]}
    assert "Not yet measured." in sections["C1: What the loop costs the host per step"]
    gpu = sections["One GPU"]
    assert gpu.count("Not yet measured.") == len(performance_page.GPU_ROWS) + 1
    assert "Target: <= 22.2 ms, which is" in gpu
    assert "| on GPUs (NCCL) | 2 and more | 1 and more | not yet measured |" in sections["Scaling"]


def test_the_scaling_table_has_every_layout(tmp_path: Path) -> None:
    layout = {"strategy": "ddp", "processes": 2, "hosts": 1, "collectives": 3, "bytes": 37.2e6}
    layout |= {"efficiency": 0.41, "efficiency_of_work": 0.82}
    rows = [row("scaling", "largest relative difference of a loss to one process", 1e-6, "x", "<= 1e-5")]
    write_results(tmp_path / "any_name.json", "Scaling", rows, {"layouts": [layout], "cores": 2})
    text = performance_page.page(tmp_path)
    assert "| ddp | 2 | 1 | 3 | 37.2 | 0.41 | 0.82 |" in text
    assert "| on CPU processes |" not in text


def test_an_ablation_is_a_table_of_its_options(tmp_path: Path) -> None:
    def variant(name: str, seconds: float, error: float) -> dict[str, Any]:
        times = {n: [seconds, seconds * 2] for n in ("loop_step_seconds", "loop_step_cpu_seconds")}
        return {"name": name, "values": times | {"process_rss_gib": [2, 2], "loss": [1, 1], "mean_nrmse": [error] * 2}}

    option = "objective.inverse_every: 1 -> 4"
    fused, coarse = "optimizer.fused: False -> True", "attention: 'sdpa_math' -> 'auto'"
    single = [variant(fused, 0.9, 0.1 + 1e-7), variant(coarse, 0.9, 0.10001), variant(option, 0.8, 0.1)]
    found = {"variants": [variant("base", 1.0, 0.1), *single, variant("all", 0.5, 0.11)]}
    on_top = [{"variants": [variant("compile.mode=off", 0.5, 0.1), variant("compile.mode=on", 0.6, 0.1)]}]
    on_top += [{"variants": [variant("precision=fp32", 0.5, 0.1), variant("precision=bf16", 0.4, 0.102)]}]
    combined = {"all at equal work": {"variants": [variant("base", 1.0, 0.1), variant("changed.yaml", 0.625, 0.1)]}}
    rows, table = ablation.rows_of("pde", found, on_top, combined)
    assert [r.value for r in rows] == pytest.approx([2, 2, 0, 0.1, 1e-6, 1e-4, 0, 0])
    verdicts = " ".join(r.verdict for r in rows)
    assert verdicts == "reported reported passed FAILED passed FAILED passed passed"
    details = {"ablation": {"recipe": "pde", "rounds": 2, "options": table}}
    write_results(tmp_path / "a.json", "Options", rows, details)
    text = performance_page.page(tmp_path)
    assert f"| `{option}` (skips work: inverse losses in one step of several) | 1.250 x" in text
    lines = {line.split(" | ")[0].strip("| "): line.split(" | ")[4] for line in text.splitlines() if " x (" in line}
    assert lines["on top of all: `compile.mode=on`"] == "yes (0e+00)"
    assert lines["on top of all: `precision=bf16` (another precision)"] == "need not be"
    assert lines["all at equal work"] == "yes (0e+00)"
    assert (lines[f"`{fused}`"], lines[f"`{coarse}`"]) == ("yes (1e-06)", "**no** (1e-04)")
    assert "| on top of all: `compile.mode=on` | 0.833 x" in text
    assert "| x 1.000 | need not be | +0.00% | +10.00% |" in text


def test_a_changed_preset_is_that_preset_and_the_changes(tmp_path: Path) -> None:
    for recipe, combined in ablation.COMBINED.items():
        for side, changes in combined.values():
            path = ablation.write_preset(recipe, side, changes, tmp_path)
            plain = flatten(read_yaml(ROOT / "recipes" / "presets" / f"{recipe}_{side}.yaml"))
            assert flatten(read_yaml(path)) == plain | changes


def test_muon_is_held_against_the_best_of_adamw(tmp_path: Path) -> None:
    def run(optimizer: str, lr: float, error: float, *losses: float) -> dict[str, Any]:
        points = [(10 * n, 2.0 * n, loss) for n, loss in enumerate(losses, 1)]
        return {"optimizer": optimizer, "lr": lr, "points": points, "mean_nrmse": error}

    runs = [run("adamw", 1e-3, 0.04, 3, 2, 1.0), run("muon", 1e-3, 0.03, 2, 0.9, 0.8)]
    runs += [run("adamw", 2e-3, 0.05, 3, 2, 1.5), run("muon", 2e-3, 0.06, 2, 1.9, 1.8)]
    rows, table = muon.judged(runs)
    assert [r.value for r in rows] == pytest.approx([0.8, 0.75, 20 / 30, 4 / 6])
    write_results(tmp_path / "m.json", "Muon", rows, {"muon": {"words": "Words.", "runs": table}})
    text = performance_page.page(tmp_path)
    assert "| muon | 0.001 | 0.80000 | 0.0300 | 20 | 4 s |" in text
    assert "| muon | 0.002 | 1.80000 | 0.0600 | not |  |" in text
    rows, _ = muon.judged([runs[0], runs[3]])
    assert len(rows) == 2  # nothing is said of a time where it never got there


def test_an_empty_folder_gives_a_page_and_another_file_is_refused(tmp_path: Path) -> None:
    assert "not yet measured" in performance_page.page(tmp_path)
    (tmp_path / "old.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"old\.json has schema None"):
        performance_page.page(tmp_path)


def test_every_result_has_its_machine_versions_commit_and_command() -> None:
    for path in RESULTS.glob("*.json"):
        environment = json.loads(path.read_text())["environment"]
        assert {"hardware", "versions", "commit", "command"} <= environment.keys(), path
        assert environment["command"].startswith("python"), path


# -------------------------------------------------------------------------------------------------------- the scripts
def check(path: Path, id: str) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    rows = [r for r in content["rows"] if r["id"] == id]
    assert rows
    assert all(isfinite(r["value"]) for r in rows)
    assert content["environment"]["versions"]["torch"] == version("torch")
    performance_page.page(path.parent)
    return rows


def test_every_script_of_the_suite_is_tested() -> None:
    assert {job.module for job in JOBS.values()} == {*IN_PROCESS, *LONG, "shards", "ablation", "muon"}


def test_every_result_on_a_cpu_has_its_job() -> None:
    """All but the memory of adapters, which fills no row."""
    written = {path.name for path in RESULTS.glob("*_cpu*.json")}
    assert written | {"shards_cpu.json"} == {job.file for job in JOBS.values()}


MINUTES = {"optimizer", "activation_checkpointing", "loop", "gemm"}
"""They compile at any size, or train beside four other trainers."""
COMPARED_WITH = {"optimizer": "bitsandbytes", "mmdit_block": "diffusers"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in MINUTES else name for name in IN_PROCESS]
)
def test_a_script_runs_at_a_tiny_size(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in COMPARED_WITH:
        compiling.skip_without(COMPARED_WITH[name])
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", [name, "--tiny", "--output", str(tmp_path / "result.json")])
    try:
        assert import_module(f"benchmarks.{name}").main() in (0, 1)  # targets mean nothing at this size
    finally:
        torch.set_num_threads(threads)
    rows = check(tmp_path / "result.json", IN_PROCESS[name])
    if name == "optimizer":
        absent = json.loads((tmp_path / "result.json").read_text())["absent"]
        assert "adamw8bit" not in absent
    if name == "loop":
        (reads,) = [r for r in rows if "reads of the device" in r["name"]]
        assert (reads["value"], reads["verdict"]) == (0, "passed")


def test_the_readers_of_shards_run_at_a_tiny_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["shards", "--tiny", "--output", str(tmp_path / "result.json")])
    try:
        assert import_module("benchmarks.shards").main() == 0
    finally:
        torch.set_num_threads(threads)
    assert len(check(tmp_path / "result.json", "shards")) == 7


def run(module: str, tmp_path: Path, *arguments: str, ok: tuple[int, ...] = (0, 1)) -> Path:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--output", str(output), *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=1700,  # compiling, on a machine that does other things beside it
    )
    assert done.returncode in ok, done.stdout + done.stderr
    assert output.exists(), done.stdout + done.stderr
    return output


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LONG)
def test_a_long_script_runs_at_a_tiny_size(name: str, tmp_path: Path) -> None:
    rows = check(run(name, tmp_path, "--tiny"), LONG[name])
    exact = {r["name"]: r["value"] for r in rows if r["unit"] == "count"}
    if name == "accumulation":
        assert exact["reductions of each gradient per step, most"] == 1
        assert exact["reductions of each gradient per step, least"] == 1
        assert exact["the same with a reduction on every micro-batch"] == 4
    if name == "exchange":
        assert exact["options whose gradients differ from the default's in a bit, powersgd aside"] == 0
        assert {r["verdict"] for r in rows if "memory of gradients and buckets" in r["name"]} == {"passed"}
    if name == "compile":
        assert exact["2M: graph breaks"] == exact["2M: recompilations"] == 0
        assert exact["2M, 3 lengths: graphs with compile.dynamic"] == 2
        assert exact["2M, 3 lengths: graphs without"] == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ablation_and_muon_run_at_a_tiny_size(tmp_path: Path) -> None:
    check(run("ablation", tmp_path, "pde", "--rounds", "1", "--max_steps", "20"), "ablation")
    small = ("--max_steps", "30", "--rates", "1e-3", "--", "--evaluation.samples", "8")
    check(run("muon", tmp_path, *small), "muon")


# ------------------------------------------------------------------------------------------------------- the GPU suite
def test_our_sd3_is_diffusers_with_its_weights() -> None:
    torch.manual_seed(0)
    theirs, ours = diffusers_model(SMALL), SD3(SMALL)
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    copy_model(ours, theirs)
    batch = batch_of(SMALL, torch.device("cpu"))
    assert torch.allclose(loss_sum(ours, batch), loss_sum(theirs_call(theirs), batch), rtol=1e-6)
    shown = [model(*(batch[k] for k in ("latents", "text", "pooled", "time"))) for model in (ours, theirs_call(theirs))]
    assert torch.allclose(shown[0], shown[1][0], atol=1e-5)


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, width=32, depth=1, side=4, batch=1)])
def test_training_flops_are_those_that_torch_counts(shape: Shape) -> None:
    model, batch = SD3(shape), batch_of(shape, torch.device("cpu"))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_sum(model, batch).backward()
    assert counter.get_total_flops() == shape.batch * shape.train_flops()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("width", "depth", "rows"), [(64, 1, 2), (128, 2, 1)])
def test_the_flops_of_a_step_on_a_cpu_include_attention(precision: str, width: int, depth: int, rows: int) -> None:
    length = 256 + 77
    tokens = length * 24 * width**2 + 4 * length**2 * width
    modulation = 2 * 12 * width**2  # of two modalities; the conditioning needs no gradient
    step = gemm.step_of(width, depth, rows, precision)
    assert gemm.flops_of(step) == depth * rows * (3 * tokens + 2 * modulation)
    with sdpa_kernel(SDPBackend.MATH):
        assert gemm.flops_of(step) == depth * rows * (3 * tokens + 2 * modulation)


@pytest.mark.parametrize(
    ("shape", "teraflops"),
    [
        (Shape(), 5.406),
        (Shape(side=128), 25.309),
        (Shape(768, 12, side=32, text_tokens=77), 0.1811),
    ],
)
def test_flops_of_the_published_shapes(shape: Shape, teraflops: float) -> None:
    """Of diffusers' model, whose last block also makes queries of the text."""
    assert shape.train_flops() / 1e12 == pytest.approx(teraflops, rel=3e-3)


def test_the_large_model_has_sd3_mediums_parameters() -> None:
    with torch.device("meta"):
        ours, theirs = SD3(Shape()), diffusers_model(Shape())
    queries = 1536 * 1537  # of the text, in the last block
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert counts[1] == counts[0] + queries
    assert counts[1] == pytest.approx(2028.3e6, rel=1e-4)


DRY = Machine(torch.device("cpu"), tiny=True, limit_seconds=1e9)
"""Its clock runs from here on, through all tests before these."""
DRY_ABSENT = {
    "G3, 24.3 GB of state": "a dry run saves some megabytes",
    "G3, speed of the way to the host": "on a CPU the snapshot is a copy",
    "G8, memory of the device": "a CPU has none to save",
}
"""What a CPU cannot show, and why. Everything else of the suite is run, at a size at which figures mean nothing."""


def run_gpu(directory: Path, *arguments: str) -> str:
    """What the GPU suite prints; its files go to the directory."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--directory", str(directory), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=1700
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_gpu_suite_runs_dry(tmp_path: Path) -> None:
    printed = run_gpu(tmp_path, "--tiny")
    assert "UsageError: float8: tensorwise needs an NVIDIA GPU" in printed
    assert "kernels are those of a GPU" in printed
    written = [name for name in gpu.PARTS if name not in ("float8", "trace")]
    contents = {name: json.loads((tmp_path / f"gpu_{name}.json").read_text()) for name in written}
    absent = {what: reason for content in contents.values() for what, reason in content["absent"].items()}
    details = {name: {k: v for k, v in c["details"].items() if k != "product_flops"} for name, c in contents.items()}
    assert absent.keys() == DRY_ABSENT.keys(), absent
    assert all(reason in absent[what] for what, reason in DRY_ABSENT.items()), absent
    rows = [r for content in contents.values() for r in content["rows"]]
    assert {r["id"] for r in rows} == set(performance_page.GPU_ROWS)
    assert all(isfinite(r["value"]) for r in rows)
    performance_page.page(tmp_path)
    assert all(r["value"] > 0 for r in rows if r["unit"] in ("s", "TFLOP/s", "GB/s", "MFU"))
    waits = [r["value"] for r in rows if r["name"].startswith("waits for the device")]
    assert waits == [0, 0]
    same = [r["verdict"] for r in rows if "relative difference" in r["name"]]
    assert same == ["passed"] * 3  # diffusers' model; the raw loop at two sizes
    saved = {name: job["state_bytes"] for name, job in details["saving"].items()}
    names = [*gpu_saving.CONTENDERS, "host_bound"]
    assert saved == dict.fromkeys(names, 12 * sum(p.numel() for p in SD3(TINY).parameters()))
    compiled = {way: (job["graphs"], job["seconds"] > job["step"] > 0) for way, job in details["compile"].items()}
    assert compiled == {"cold": (2, True), "warm": (2, True), "whole": (1, True)}
    stepped = {name: job["optimizer"] for name, job in details["offload"].items()}
    assert stepped == {
        f"{n} {a}": o for a in (1, 8) for n, o in (("adamw", "FusedAdamW"), ("adamw_offload", "HostAdamW"))
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at it
def test_compile_times_are_those_of_a_compilation(tmp_path: Path) -> None:
    """One graph for each kind of block, in a process of its own as in the suite; one for the whole, in this one."""
    torch._dynamo.reset()
    jobs = [gpu_training.in_own_process("regional", str(tmp_path), DRY), gpu_training.compile_once("full", DRY)]
    assert [job["graphs"] for job in jobs] == [2, 1]
    assert all(job["seconds"] > job["step"] > 0 for job in jobs)


@pytest.mark.slow
def test_state_in_host_memory_is_timed_against_the_same_steps() -> None:
    found = Found()
    gpu_parts.g8(DRY, 0.0, found)
    assert [r.target for r in found.rows] == ["<= 1.2", "<= 1.05"]
    assert [job["optimizer"] for job in found.details.values()] == ["FusedAdamW", "HostAdamW"] * 2


def test_a_part_that_stops_early_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = gpu_parts.state_on

    def state_on(machine: Machine, found: Found, name: str, pieces: int, *rest: Any) -> dict[str, Any]:
        return steps(replace(machine, limit_seconds=1e6 if pieces == 1 else 0.0), found, name, pieces, *rest)

    monkeypatch.setattr(gpu_parts, "state_on", state_on)
    found = gpu.measure(DRY, "offload", 0.0)
    assert [r.name.split(",")[2] for r in found.rows] == [" accumulation 1"]
    assert found.details.keys() == {"adamw 1", "adamw_offload 1"}
    assert found.absent["the rest of offload"].startswith("TimeoutError: adamw at accumulation 8")


def test_a_peer_without_room_takes_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(gpu_training, "PEERS", dict.fromkeys(gpu_training.PEERS, no_room))
    monkeypatch.setattr(gpu_training, "has_diffusers", lambda: False)  # which takes its time to import
    found = gpu.measure(DRY, "large", 1e9)
    assert [r.id for r in found.rows] == ["G1", "G1", "G2", "G2", "G2", "G2"]
    (over_raw,) = [r for r in found.rows if "clip and average in the kernel" in r.name]
    assert over_raw.target == "<= 1.003"
    (apart,) = [r for r in found.rows if "relative difference" in r.name]
    assert apart.verdict == "passed"
    assert found.details["losses"].keys() == {"trainer", "raw", "by hand"}
    assert [reason for what, reason in found.absent.items() if "speed over" in what] == [
        "OutOfMemoryError: no room"
    ] * 2
    assert len(found.failed) == 2


def test_a_part_without_room_says_what_it_needs() -> None:
    machine = replace(DRY, tiny=False)
    needing = {"large", "trace", "long", "float8", "offload", "optimizer"}
    assert {name for name in gpu.PARTS if gpu.lacking(name, machine)} == needing
    assert gpu.lacking("large", machine) == "needs 62 GB of the device, 9 are free"
    found = gpu.measure(machine, "float8", 0.0)
    assert found.failed == ["float8"]
    assert not found.rows


def test_a_file_is_not_replaced_by_one_with_fewer_targets(tmp_path: Path) -> None:
    def write(*names: str, failed: str = "") -> bool:
        found = Found([row("G5", name, 1.0, target=">= 0") for name in names])
        if failed:
            found.fails(failed, "no room")
        return gpu.write(DRY, "optimizer", found, (1.0, 1.0), tmp_path)

    def names(path: Path) -> list[str]:
        return [stored["name"] for stored in json.loads(path.read_text())["rows"]]

    assert write("a", "b")
    assert not write("c", failed="the rest of optimizer")
    assert names(tmp_path / "gpu_optimizer.json") == ["a", "b"]
    assert names(tmp_path / "incomplete" / "gpu_optimizer.json") == ["c"]
    assert not write("d", "e", failed="a peer")  # all targets that there are hold, and one is missing
    assert names(tmp_path / "gpu_optimizer.json") == ["d", "e"]


def test_results_of_another_device_are_found_before_anything_is_measured(tmp_path: Path) -> None:
    for name in ("gpu_large", "gpu_small", "one_gpu"):
        write_results(tmp_path / f"{name}.json", "G", [], {})
    own = performance_page.device(json.loads((tmp_path / "one_gpu.json").read_text())["environment"])
    assert gpu.of_another_device(tmp_path, own, ["large"]) == []
    left = gpu.of_another_device(tmp_path, "NVIDIA A100", ["large"])
    assert left == [f"gpu_small.json ({own})", f"one_gpu.json ({own})"]


def test_traffic_is_that_of_the_kernels_that_ran() -> None:
    optimizer = FusedAdamW([{"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    assert gpu_parts.bytes_a_value(optimizer) == 48
    optimizer.one_pass = True
    assert gpu_parts.bytes_a_value(optimizer) == 40


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NTN", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64", "attention"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>", "AdamW"),
        (
            "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<1>, LpNormFunctor",
            "gradient norm",
        ),
        (
            "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<2>, BinaryOpScalar",
            "moving average",
        ),
        ("triton_poi_fused_gelu_15", "compiled elementwise kernels"),
        ("triton_red_fused_sum_17", "compiled reductions"),
        ("void at::native::reduce_kernel<512, 1>", "other kernels"),
    ],
)
def test_kernels_of_a_trace_have_their_kind(kernel: str, kind: str) -> None:
    assert gpu_training.kind_of(kernel) == kind


def test_there_is_no_mfu_without_a_known_peak() -> None:
    found = Found()
    gpu_training.add_mfu(found, replace(DRY, tiny=False), "a model", SMALL, [1.0], ">= 0.45", ">= 0.5")
    assert not found.rows
    assert found.absent == {"MFU, a model": "the bf16 peak of cpu is not in accel_train/speed/device_peaks.py"}
    gpu_training.add_mfu(found, DRY, "a model", SMALL, [1.0], ">= 0.45", ">= 0.5")
    assert "stand-in" in found.rows[0].name


@pytest.mark.parametrize(("whole", "verdict"), [(True, "FAILED"), (False, "reported")])
def test_saving_is_held_against_targets_at_the_whole_size_only(whole: bool, verdict: str) -> None:
    found = Found()
    job = {"state_bytes": 24.3e9, "blocked_ms": [31.0], "hidden_ms": [151.0]}
    gpu_saving.add_ours(found, job | {"to_host_gb_per_second": 44.0, "locked_gb_per_second": 50.0}, whole)
    assert [r.verdict for r in found.rows] == [verdict] * 3
    assert [r.name.split(":")[0] for r in found.rows] == ["24.3 GB of state"] * 3


@pytest.mark.parametrize("count", [3, 20, 95])
def test_what_a_window_takes_to_start_is_no_cost_of_a_save(count: int) -> None:
    start, step, lost = 0.3, 0.2, 0.05

    def of(steps: int, extra: float = 0.0) -> gpu_saving.Window:
        return gpu_saving.Window(start + (steps - 1) * step + extra, steps, start, [])

    assert gpu_saving.hidden(of(count, lost), (of(20), of(20))) == pytest.approx(lost)


def test_a_window_counts_the_first_step_apart() -> None:
    clock = [0.0]

    class Steps:
        small = torch.zeros(1)

        def settle(self) -> None:
            pass

        def step(self) -> None:
            clock[0] += 1.0 if clock[0] else 5.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_saving.time, "perf_counter", lambda: clock[0])
        found = gpu_saving.window(cast(Any, Steps()), 3, lambda: clock[0] > 8)
    assert (found.seconds, found.steps, found.first, found.step) == (9.0, 5, 5.0, 1.0)


def test_dcp_stages_before_the_weights_change(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    weights = {"w": torch.arange(1000.0)}
    saving = gpu_saving.dcp_async_save(SimpleNamespace(small=weights["w"], tensors=lambda: weights), tmp_path)
    try:
        for number in (1.0, 2.0):
            weights["w"].fill_(number)
            saving.begin()
            saving.before_update()
            weights["w"].fill_(-1.0)
            while not saving.poll():
                pass
        loaded = {"w": torch.zeros(1000)}
        dcp.load(loaded, checkpoint_id=str(tmp_path / "dcp1"))
        assert set(loaded["w"].tolist()) == {2.0}
        assert not (tmp_path / "dcp0").exists()
    finally:
        saving.close()
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_suite(tmp_path: Path) -> None:
    run_gpu(tmp_path, "--only", "optimizer", "small")
    check(tmp_path / "gpu_optimizer.json", "G5")
    check(tmp_path / "gpu_small.json", "G2")
