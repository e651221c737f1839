"""What the suite records of a machine, and on which device its scripts run."""

from __future__ import annotations

import inspect
import json
import math
import re
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import method, one_gpu, performance_page, scaling, suite
from benchmarks.method import facts, largest, largest_difference, measured_commit, row, write_results


def git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *author, *arguments], check=True, capture_output=True)


def test_what_the_suite_writes_does_not_make_the_commit_dirty(tmp_path: Path) -> None:
    written = [tmp_path / "benchmarks" / "results" / "a.json", tmp_path / "docs" / "performance.md"]
    code = tmp_path / "benchmarks" / "loop.py"
    for path in (*written, code):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "all")
    commit = measured_commit(tmp_path)
    assert commit is not None
    assert "dirty" not in commit
    for path in written:
        path.write_text("2")
    assert measured_commit(tmp_path) == commit
    code.write_text("2")
    assert measured_commit(tmp_path) == f"{commit}-dirty"


def test_the_cpu_is_always_recorded_and_a_gpu_only_where_it_was_used() -> None:
    found = facts()
    assert found["hardware"].endswith("cores")
    assert "gpu" not in found
    assert performance_page.hardware(found) == found["hardware"]
    gpu = {"name": "NVIDIA H200", "driver": "570.1", "cuda": "12.8"}
    words = performance_page.hardware(found | {"gpu": gpu})
    assert words == f"NVIDIA H200, driver 570.1, CUDA 12.8; {found['hardware']}"


def test_a_job_of_the_cpu_suite_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    expected = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    assert suite.environment().items() >= expected.items()
    method.on_cpu()
    assert {name: suite.os.environ[name] for name in expected} == expected


@pytest.mark.parametrize("name", ["causal_lm", "startup", "muon", "demo_steps", "ablation"])
def test_a_script_that_starts_recipes_hides_gpus_first(name: str) -> None:
    main = inspect.getsource(import_module(f"benchmarks.{name}").main)
    assert main.index("on_cpu()") < main.index("write_results")


def test_a_value_that_is_not_a_number_is_the_largest(tmp_path: Path) -> None:
    assert largest([1.0, 3.0, 2.0]) == 3.0
    assert math.isnan(largest([1.0, math.nan]))
    assert largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert math.isnan(largest_difference([1.0, math.nan], [1.0, 2.0]))
    found = one_gpu.compare({"losses": [1.0, math.nan]}, {"losses": [1.0, 1.0]})
    assert found is not None
    assert math.isnan(found)
    failed = row("C2", "difference", found, target="<= 1e-5")
    assert failed.verdict == "FAILED"
    write_results(tmp_path / "a.json", "C2", [failed], {})
    assert "| difference | nan x |" in performance_page.page(tmp_path)


def test_a_layout_whose_loss_is_not_a_number_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(layout: scaling.Layout, folder: Path, worker: list[str]) -> dict[str, Any]:
        losses = [1.0, 1.0] if layout.processes == 1 else [1.0, math.nan]
        return {"losses": losses, "seconds": 1.0, "processor_seconds": 1.0, "collectives": 1, "bytes": 1}

    monkeypatch.setattr(scaling, "run", run)
    layouts = (scaling.Layout("single", 1), scaling.Layout("ddp", 2), scaling.Layout("ddp", 4))
    rows, _, _ = scaling.measure(layouts, [], rounds=2)
    assert math.isnan(rows[0].value)
    assert rows[0].verdict == "FAILED"


def test_commands_of_jobs_are_those_of_their_files() -> None:
    """What is recorded in a file is what the suite would run again."""
    for name, job in suite.JOBS.items():
        path = method.RESULTS / job.file
        if path.exists():
            recorded = json.loads(path.read_text())["environment"]["command"].split()
            assert recorded[2] == f"benchmarks.{job.module}", name


def gpu_file(folder: Path, name: str, hardware: str, *rows: method.Row, **more: Any) -> None:
    write_results(folder / f"{name}.json", name, rows, more)
    path = folder / f"{name}.json"
    content = json.loads(path.read_text())
    content["environment"]["hardware"] = hardware
    path.write_text(json.dumps(content))


def test_results_of_two_gpus_make_no_page(tmp_path: Path) -> None:
    gpu_file(tmp_path, "gpu_large", "NVIDIA H200", row("G1", "MFU", 0.4))
    assert "Measured on: NVIDIA H200." in performance_page.page(tmp_path)
    gpu_file(tmp_path, "gpu_small", "NVIDIA A100", row("G2", "over", 1.0))
    with pytest.raises(ValueError, match=r"gpu_large\.json: NVIDIA H200, gpu_small\.json: NVIDIA A100"):
        performance_page.page(tmp_path)


def test_where_the_traced_step_goes_is_computed_from_its_rows(tmp_path: Path) -> None:
    """On any machine: no figure of another stands under it."""
    times = {"matrix products": 60.0, "attention": 20.0, "AdamW": 8.0, "gradient norm": 2.0}
    times |= {"compiled elementwise kernels": 6.0, "compiled reductions": 4.0}
    rows = [row("G1", f"large step: {kind}", value, "ms") for kind, value in times.items()]
    gpu_file(tmp_path, "gpu_trace", "some GPU", *rows, seconds=[0.1, 0.1, 0.2])
    text = performance_page.page(tmp_path)
    assert "Of the 100 ms of the traced step, by a profile, matrix products 60.0" in text
    assert "take 90 together, and compiled kernels 10. If those took no time at all, a step would be 1.11 times" in text
    assert "H200" not in text.split("## One GPU")[1].split("Targets are for an H200.")[1]


def test_under_a_table_stand_machine_date_commit_clock_and_rounds(tmp_path: Path) -> None:
    write_results(tmp_path / "a.json", "C1", [row("C1", "cost", [1.0, 2.0, 3.0]), row("C1", "count", 1.0)], {})
    e = json.loads((tmp_path / "a.json").read_text())["environment"]
    expected = f": {e['hardware']}, {e['date']}, commit `{e['commit'][:12]}"
    text = performance_page.page(tmp_path)
    (line,) = [line for line in text.splitlines() if line.startswith("From [a.json]")]
    assert expected in line
    assert line.endswith(f" Timed: {performance_page.CLOCKS['C1']}; 3 rounds.")


def test_a_limit_of_time_is_no_property_of_what_is_measured(tmp_path: Path) -> None:
    absent = {"the rest": "TimeoutError: 41 s were left", "runs": "190 s were over", "peer": "not installed"}
    write_results(tmp_path / "a.json", "C1", [row("C1", "cost", 1.0)], {}, absent)
    text = performance_page.page(tmp_path)
    assert "absent: the rest (not yet measured); runs (not yet measured); peer (not installed)." in text


def test_versions_of_equal_environments_are_named_once(tmp_path: Path) -> None:
    for name in "ab":
        write_results(tmp_path / f"{name}.json", "C1", [row("C1", "cost", 1.0)], {})
    origins = performance_page.page(tmp_path).split("## Where these numbers come from")[1]
    assert origins.count("accelerate ") == 1
    assert [line[:7] for line in origins.splitlines() if line.startswith("- **")] == ["- **a**", "- **b**"]


def test_the_age_of_a_file_is_counted_in_commits() -> None:
    lines = performance_page.age(performance_page.read(method.RESULTS))
    assert len(lines) == len(list(method.RESULTS.glob("*.json")))
    assert all(re.search(r" (\d+|an unknown number of) commits since$", line) for line in lines)


def test_scaling_shows_the_interval_of_its_rounds() -> None:
    layout = {"efficiency": 0.5, "efficiency_interval": [0.4, 0.6], "efficiency_of_work": 0.8}
    assert performance_page.share(layout, "efficiency") == "0.50 (0.40 to 0.60)"
    assert performance_page.share(layout, "efficiency_of_work") == "0.80"


def test_the_durable_write_has_the_target() -> None:
    from benchmarks import checkpoint

    job = {"loop_speed_kept_rounds": [1.0], "longest_iteration_ms_rounds": [1.0], "blocked_ms": 1.0}
    job |= {"beside_a_hash_rounds": [1.0], "copy_of_the_same_tensors_ms": 1.0, "speed_over_copy_rounds": [0.8, 0.95]}
    writing = {"durable_over_torch_save_durable": [1.0, 1.1, 1.2], "unhashed_over_torch_save": [2.0, 2.1, 2.2]}
    jobs: dict[str, Any] = dict.fromkeys(checkpoint.CONTENDERS, job) | {"writing": writing}
    jobs["reload_is_identical"] = True
    found = {r.name: r for r in checkpoint.rows_of("C4", "1 MB", jobs)}
    durable, plain = (found[f"1 MB: {name}"] for name in (checkpoint.DURABLE, checkpoint.UNHASHED))
    assert (durable.target, durable.verdict, durable.rounds) == (">= 1.3", "FAILED", 3)
    assert (plain.target, plain.verdict) == (None, "reported")
    # One of two rounds reaches it.
    assert found["1 MB: speed of the snapshot over a copy of its tensors"].verdict == "not decided"
