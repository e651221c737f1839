"""``accel-train simulate``: its flags, what it refuses, what it prints."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import psutil
import pytest
import torch

from accel_train.commands.launch import Launch
from accel_train.config import UsageError
from accel_train.data.grouping.task_sampler import TaskSampler
from accel_train.data.sampler import StepSampler
from accel_train.launch_files.machine_config import read_machine_config
from accel_train.launch_files.requested import read_request
from accel_train.planning.simulator import run_apart
from accel_train.simulation import command, worker
from accel_train.simulation.command import simulate
from accel_train.simulation.flags import DeviceType, Options, read_arguments
from accel_train.simulation.refusals import refuse_config, refuse_machine
from tests import zygote
from tests.distributed.launching import PRESETS, ROOT, SMALL, Layout, environment
from tests.simulation.counting import ANYTHING, counted, simulated
from tests.waiting import PATIENCE_SECONDS, until


def options(**changed: Any) -> SimpleNamespace:
    """What the refusals read of a config, at the defaults."""
    values: dict[str, Any] = {
        "evaluate_only": False,
        "compile": SimpleNamespace(mode="off"),
        "precision": "bf16",
        "offload_frozen": False,
        "activation_checkpointing": SimpleNamespace(offload=False),
        "optimizer": SimpleNamespace(name="adamw"),
        "distributed": SimpleNamespace(comm_hook="none", gradient_as_bucket_view=None),
    }
    return SimpleNamespace(**values | changed)


def height_of(picture: Path) -> int:
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[20:24])


def before_the_recipe(num_processes: str) -> argparse.Namespace:
    flags = {"config_file": None, "step": None, "micro_batches": None, "json": False, "picture": None}
    return argparse.Namespace(num_processes=num_processes, **flags)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["simulate"], id="simulate"),
        pytest.param(["plan", "--gpus", "1", "--vram_gib", "24"], id="plan", marks=pytest.mark.slow),
    ],
)
def test_a_worker_ends_with_a_command_that_is_killed(words: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_train.cli", *words, "mmdit", "base"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (worker, *_) = until(psutil.Process(process.pid).children)
    output = Path("/proc") / str(worker.pid) / "fd" / "1"
    # It is tied to its parent before it has another command line, or another output.
    until(lambda: "accel_train.simulation.worker" in worker.cmdline() or output.readlink().name == "output.txt")
    process.kill()
    process.wait()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def listens(program: psutil.Process) -> bool:
    """Whether a calibration has taken SIGTERM from Python, which leaves it to the kernel."""
    if not any(word.endswith("program.py") for word in program.cmdline()):
        return False
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{program.pid}/status").read_text())
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("words", "number", "begun"),
    [
        pytest.param(
            ["plan", "mmdit", "base", "--gpus", "8", "--vram_gib", "24"],
            signal.SIGINT,
            "accel-train-plan-*/accel-train-simulate-*",
            id="plan",
        ),
        pytest.param(
            ["simulate", "mmdit", "base"],
            signal.SIGTERM,
            "accel-train-simulate-*/accel-train-simulate-*",
            id="simulate",
            marks=pytest.mark.slow,  # a plan is stopped amid its simulations
        ),
        pytest.param(["calibrate", "--seconds", "60"], signal.SIGINT, "accel-train-*", id="calibrate"),
    ],
)
def test_a_stopped_command_says_one_line_and_leaves_nothing(
    words: list[str], number: signal.Signals, begun: str, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "accel_train.cli", *words],
            env=environment(TMPDIR=str(scratch), PYTHONPATH=str(ROOT)),
            cwd=tmp_path,
            stdout=file,
            stderr=file,
            start_new_session=True,
            # A shell that runs the tests in the background ignores it, and so would this process.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    until(lambda: process.poll() is not None or list(scratch.glob(begun)), log.read_text)
    if words[0] == "calibrate":
        until(lambda: any(map(listens, psutil.Process(process.pid).children())), log.read_text)
    # As a terminal does, to the process and all that it has started.
    os.killpg(process.pid, number)
    assert process.wait(PATIENCE_SECONDS) == 128 + number, log.read_text()
    said = log.read_text()
    assert said.endswith("stopped; nothing was written\n")
    assert said.count("stopped; ") == 1
    assert "Traceback" not in said
    assert not list(scratch.glob("accel-train-*"))
    assert not list(tmp_path.glob("*.json"))


def test_flags_may_stand_behind_the_recipe() -> None:
    earlier = argparse.Namespace(
        config_file=None, num_processes="8", step=None, micro_batches=None, json=False, picture=None
    )
    words = [
        "base",
        "--num_processes",
        "8,64",
        "--micro_batch_size",
        "4",
        "--json",
        "--micro_batches",
        "2",
        "--config_file",
        "x.yaml",
    ]
    rest, found = read_arguments(words, earlier)
    assert rest == ["base", "--micro_batch_size", "4"]
    assert found == Options("x.yaml", (8, 64), None, 2, True, None)
    assert read_arguments(["--device_type", "cpu"], earlier)[1].device_type == "cpu"
    # Between equal numbers nothing scales.
    assert read_arguments(["--num_processes", "8,64,8"], earlier)[1].num_processes == (8, 64)


@pytest.mark.parametrize("text", ["0", "8,", "a", "8;9"])
def test_numbers_of_processes_are_whole(text: str) -> None:
    earlier = argparse.Namespace(
        config_file=None, num_processes=text, step=None, micro_batches=None, json=False, picture=None
    )
    with pytest.raises(UsageError, match=r"num_processes: .*give --num_processes 8,64,512"):
        read_arguments([], earlier)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--link roce-100",
            r"link: roce-100: .*require a device; give --device h100-sxm.*or leave --link out",
        ),
        ("--gpus_per_machine 4", r"gpus_per_machine: 4: .*require a device.*or leave --gpus_per_machine out"),
        (
            "--device h200 --gpus_per_machine 0",
            r"gpus_per_machine: 0: at least 1 .*give --gpus_per_machine 8",
        ),
        ("--device h200 --link roce-10", r"link: roce-10: .*did you mean 'roce-100'\?\); give one of them"),
        (
            "--device h200 --num_processes 8,16",
            r"link: not given: 16 processes fill 2 machines .*--link infiniband-ndr",
        ),
        (
            "--device h200 --link roce-100 --num_processes 8,20",
            r"gpus_per_machine: 8: 20 processes do not fill .*give --gpus_per_machine 5, or --num_processes 16",
        ),
        (
            "--device h200 --link roce-100 --num_processes 4,8",
            r"link: roce-100: 8 process\(es\) are within one machine of 8 GPUs.*leave --link out, give more "
            "--num_processes than 8",
        ),
        ("--device h200 --link roce-100", r"link: roce-100: 1 process\(es\) are within one machine"),
        (
            "--device h20 --num_processes 8",
            r"device: h20: one of the table is required.*measure another one with accel-train",
        ),
    ],
)
def test_devices_and_links_are_refused_with_exit_code_2(words: str, message: str) -> None:
    start = [sys.executable, "-m", "accel_train.cli", "simulate", "mmdit", "demo", *words.split()]
    done = zygote.run(start, env=environment(), timeout=PATIENCE_SECONDS, apart=True)
    assert done.returncode == 2, done.stdout
    assert re.search(message, done.stderr)


def test_link_and_gpus_of_a_machine_are_read_on_both_sides() -> None:
    words = ["--device", "h200", "--gpus_per_machine", "4", "base"]
    rest, found = read_arguments(words, argparse.Namespace(**vars(before_the_recipe("16")), link="roce-100"))
    assert rest == ["base"]
    assert (found.device, found.link, found.gpus_per_machine) == ("h200", "roce-100", 4)
    assert Options(None, (1,), None, None, False, None).gpus_per_machine is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "h200"], "link: not given: 8 processes fill 2 machines of 4 GPUs"),
        (["--device", "h200", "--num_processes", "10"], "10 processes do not fill machines of 4 GPUs"),
        (["--device", "h200", "--gpus_per_machine", "8", "--link", "roce-100"], "within one machine of 8 GPUs"),
    ],
)
def test_gpus_of_a_machine_are_those_of_the_launch_file(tmp_path: Path, words: list[str], message: str) -> None:
    file = tmp_path / "two.yaml"
    text = (ROOT / "accelerate_configs" / "multi_node.yaml").read_text()
    file.write_text(text.replace("num_processes: 16", "num_processes: 8"))
    rest, options = read_arguments(["demo", "--config_file", str(file), *words], argparse.Namespace())
    with pytest.raises(UsageError, match=message):
        simulate("mmdit", rest, options)


@pytest.mark.parametrize(("words", "first"), [("--help", "usage:"), ("demo --print_config", "output_dir:")])
def test_a_flag_that_the_recipe_answers_is_answered(words: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate("mmdit", words.split(), replace(ANYTHING, num_processes=(1,)))
    assert ended.value.code == 0
    # Not only its end.
    assert capsys.readouterr().out.startswith(first)


def test_a_killed_simulation_names_the_signal(tmp_path: Path) -> None:
    """That of a planner's candidate too."""
    recipe = tmp_path / "large.py"
    recipe.write_text("import os, signal\n\ndef main(argv):\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    place = tmp_path / "place"
    place.mkdir()
    request = Launch(None, str(recipe), (), num_processes=1)
    words, environment, _ = command.worker_command(request, replace(ANYTHING, num_processes=(None,)), place)
    _, returncode = run_apart(words, environment, place)
    with pytest.raises(UsageError, match=r"large\.py.*ended by SIGKILL"):
        command.refuse_killed(str(recipe), returncode)
    with pytest.raises(UsageError, match=r"large\.py.*ended by SIGKILL, .*memory.*End other programs"):
        simulate(str(recipe), [], replace(ANYTHING, num_processes=(1,)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"evaluate_only": True}, "evaluate_only: true: a simulation is of a training step.*Leave it out"),
        ({"precision": "fp16"}, "precision: fp16: .*fp32 or bf16 is required"),
        ({"compile": SimpleNamespace(mode="default")}, "compile.mode: default: .*off is required"),
        ({"offload_frozen": True}, "offload_frozen: true: .*Give --offload_frozen false"),
        (
            {"activation_checkpointing": SimpleNamespace(offload=True)},
            "activation_checkpointing.offload: true: .*one memory.*Give --activation_checkpointing.offload false",
        ),
        ({"optimizer": SimpleNamespace(name="adamw8bit")}, "optimizer.name: adamw8bit: .*bitsandbytes.*adamw or muon"),
        ({"optimizer": SimpleNamespace(name="adamw_offload")}, "optimizer.name: adamw_offload: .*one memory.*or muon"),
        (
            {"optimizer": SimpleNamespace(name="torch.optim:NAdam")},
            "optimizer.name: torch.optim:NAdam: .*no foreach.*under FSDP2 and ZeRO no start accepts one; adamw or muon",
        ),
        (
            {"distributed": SimpleNamespace(comm_hook="powersgd", gradient_as_bucket_view=None)},
            "distributed.comm_hook: powersgd",
        ),
        (
            {"distributed": SimpleNamespace(comm_hook="none", gradient_as_bucket_view=False)},
            "distributed.gradient_as_bucket_view: false: .*true is required",
        ),
    ],
)
def test_what_torch_does_not_show_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    refuse_config(options())
    with pytest.raises(UsageError, match=message):
        refuse_config(options(**changed))


def test_offload_by_torch_is_refused() -> None:
    for name in ("fsdp2", "zero2_offload", "zero3_offload"):
        refuse_machine(read_machine_config(PRESETS / f"{name}.yaml"))
    with pytest.raises(UsageError, match=r"fsdp2\.yaml"):
        refuse_machine(read_machine_config(PRESETS / "fsdp2_offload.yaml"))


@pytest.mark.slow  # half a minute of simulation, up to one of several refusals
def test_a_step_that_reads_a_value_is_refused_with_its_line(tmp_path: Path) -> None:
    recipe = (ROOT / "recipes" / "causal_lm.py").read_text()
    line = "    return model.of_tokens(batch, perplexity.targets(batch), perplexity.losses)"
    assert recipe.count(line) == 1
    reads = tmp_path / "causal_lm_reads.py"
    reads.write_text(recipe.replace(line, f"    assert float(model.logits(batch).mean()) < 99\n{line}"))
    (tmp_path / "presets").symlink_to(ROOT / "recipes" / "presets")
    asked = Options(None, (1,), None, None, False, None)
    with pytest.raises(UsageError, match=r"its step reads a value from the device \(.*causal_lm_reads\.py:\d+: assert"):
        simulate(str(reads), ["causal_lm_smoke"], asked)


@pytest.mark.slow  # the test above simulates the same recipe, up to the refusal
def test_packed_rows_of_a_language_model_are_simulated(tmp_path: Path) -> None:
    """That they do not see each other is proven on real weights only."""
    found = counted(Layout("single", 1, "causal_lm"), tmp_path)
    assert found["peak"]["by_category"]["activations"] > 0


def test_steps_are_counted_from_one_as_in_log_lines(tmp_path: Path) -> None:
    last, beyond = (replace(ANYTHING, step=step) for step in (3, 4))
    found = simulated(Layout("single", 1), tmp_path, "--max_steps", "3", options=last)
    assert found["counted"]["step"] == 3
    refused = simulated(Layout("single", 1), tmp_path, "--max_steps", "3", options=beyond)["refused"]
    assert refused.startswith("step: 4: the run has steps 1 to 3; ")


@pytest.mark.parametrize("ids", [None, "0", "0,1"])
def test_gpus_of_this_machine_and_of_the_file_do_not_count(
    ids: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    file = None
    if ids is not None:
        file = tmp_path / "ddp.yaml"
        text = f"num_machines: 1\nnum_processes: 2\ndistributed_type: MULTI_GPU\ngpu_ids: '{ids}'\n"
        file.write_text(text)
    request = Launch(file and str(file), "mmdit", num_processes=8, main_process_port=29500)
    _, variables, note = command.worker_command(request, ANYTHING, tmp_path)
    assert (variables["WORLD_SIZE"], variables["CUDA_VISIBLE_DEVICES"]) == ("8", "")
    assert read_request(variables, []).num_processes == 8
    assert (note is None) == (file is not None)


def test_a_simulation_resumes_nothing(tmp_path: Path) -> None:
    """Its run directory is a temporary one, without the checkpoint that the option demands."""
    found = simulated(Layout("single", 1), tmp_path, "--resume", "must")
    assert found["notes"] == ["resume: must: left out, since a simulation reads no run and no checkpoint"]


def test_more_processes_than_samples_are_simulated_with_a_note(tmp_path: Path) -> None:
    """The data has fewer samples than the enlarged batch."""
    found = simulated(Layout("ddp", 512), tmp_path)
    assert found["notes"] == [
        "global_batch_size: 16 is smaller than 512 processes, which a start refuses: simulated with 8,192, one "
        "micro-batch of 16 on each"
    ]
    assert found["counted"]["rows"] == 16
    assert found["counted"]["global_batch_size"] == 8192


@pytest.mark.parametrize("sampler", [partial(StepSampler, 3), partial(TaskSampler, (9, 3))], ids=["plain", "tasks"])
def test_a_batch_larger_than_the_data_repeats_its_samples(sampler: partial[StepSampler | TaskSampler]) -> None:
    with worker._samples_repeated(True):  # pyright: ignore[reportPrivateUsage]
        order = sampler(global_batch_size=8, seed=0)
    for step in range(4):
        draws = order.draws(step)
        assert len({draw.occurrence for draw in draws}) == 8
        assert max(draw.sample for draw in draws) < order.dataset_size
    with pytest.raises(UsageError, match="has 3 samples, but at least one global batch"):
        sampler(global_batch_size=8, seed=0)


@pytest.mark.parametrize(("step", "size"), [(4, 16), (5, 24)])
def test_a_batch_is_that_of_the_simulated_step(tmp_path: Path, step: int, size: int) -> None:
    schedule = ("--batch_schedule.steps", "4", "--batch_schedule.sizes", "24", "--max_steps", "9")
    found = simulated(Layout("single", 1), tmp_path, *schedule, options=replace(ANYTHING, step=step))["counted"]
    assert (found["global_batch_size"], found["micro_batches"]) == (size, math.ceil(size / 16))


def test_of_few_simulated_micro_batches_it_is_known_how_many_the_step_has(tmp_path: Path) -> None:
    """Samples of several shapes need more of them than their number says."""
    found = counted(Layout("single", 1), tmp_path, "--micro_batch_size", "2", largest=3)
    assert (found["micro_batches"], found["of_the_step"]) == (3, 8)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_one_process_of_a_file_for_several_needs_no_gpu(tmp_path: Path, strategy: str) -> None:
    """As a base for the efficiency of several. DDP is not wrapped around the model of a single process."""
    found = counted(Layout(strategy, 1), tmp_path)
    assert (found["processes"], found["strategy"]) == (1, {"ddp": "single"}.get(strategy, strategy))


def test_a_number_of_micro_batches_is_refused_beside_a_schedule_of_batches(tmp_path: Path) -> None:
    schedule = ("--batch_schedule.steps", "4", "--batch_schedule.sizes", "24", "--max_steps", "9")
    found = simulated(Layout("ddp", 2), tmp_path, *schedule, options=replace(ANYTHING, micro_batches=1))
    assert found["refused"].startswith("micro_batches: 1: it takes the place of global_batch_size, and batch_schedule")


def test_micro_batches_are_as_many_where_their_size_is_auto(tmp_path: Path) -> None:
    """Eight samples are the share of one of two processes."""
    options = replace(ANYTHING, micro_batches=3)
    found = simulated(Layout("ddp", 2), tmp_path, "--micro_batch_size", "auto", options=options)["counted"]
    assert (found["micro_batches"], found["rows"], found["global_batch_size"]) == (3, 8, 48)


def test_no_batch_takes_the_place_of_one_that_a_schedule_changes(tmp_path: Path) -> None:
    schedule = ("--batch_schedule.steps", "4", "--batch_schedule.sizes", "24", "--max_steps", "9")
    refused = simulated(Layout("ddp", 17), tmp_path, *schedule)["refused"]
    assert refused.startswith("global_batch_size: 16 is smaller than 17 processes, which a start refuses, and batch_")


def test_a_precision_without_units_is_refused_before_the_simulation(tmp_path: Path) -> None:
    options = replace(ANYTHING, device="v100-sxm")
    found = simulated(Layout("single", 1), tmp_path, "--precision", "bf16", options=options)
    assert found["refused"].startswith("device: v100-sxm: it has no matrix units for precision bf16")


# Slow: two starts of a diffusers pipeline. The casts themselves are tested in tests/domains/images.
@pytest.mark.slow
def test_casts_are_those_of_the_device_type(tmp_path: Path) -> None:
    """CUDA's autocast computes the norms of diffusers' models in fp32, the CPU's in bf16."""
    layout = Layout("single", 1, "lora")
    peaks: dict[str, int] = {}
    for device_type in get_args(DeviceType):
        asked = replace(ANYTHING, device_type=device_type)
        found = simulated(layout, tmp_path, "--precision", "bf16", options=asked)
        peaks[device_type] = found["counted"]["peak"]["total"]
    assert peaks["cuda"] > peaks["cpu"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("x.txt", r"picture: x\.txt: .*ending of a picture is required: .*png, .*; give memory\.png"),
        ("x", "picture: x: .*ending of a picture"),
        ("{}/none/x.png", "picture: .*/none does not exist; make it"),
        ("{}", "picture: .*is a directory; give .*/memory.png"),
        ("/proc/x.png", "picture: /proc/x.png: cannot be written"),
    ],
)
def test_a_place_that_takes_no_picture_is_refused_before_the_simulation(
    place: str, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    # The recipe, which there is not, would be refused as soon as a simulation is prepared.
    with pytest.raises(UsageError, match=message):
        simulate("none", [], replace(ANYTHING, picture=place.format(folder)))
    assert list(folder.iterdir()) == []


def test_the_command_prints_a_table_and_the_same_as_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @cache
    def of(processes: int) -> Any:
        folder = tmp_path / str(processes)
        folder.mkdir()
        report = simulated(Layout("ddp", processes), folder)
        return command.Simulated(report["counted"], report["curve"], ())

    # Forked like other test processes: a new one spends seconds on its imports.
    monkeypatch.setattr(command, "_simulate_one", lambda request, _: of(request.num_processes))
    picture = tmp_path / "memory.png"
    asked = Options(None, (2, 16), None, None, False, str(picture))
    lines = simulate("mmdit", SMALL, asked).splitlines()
    assert lines[1].split()[:2] == ["processes", "global"]
    assert lines[1].split()[-1] == "FLOPs"
    assert [line.split()[:2] for line in lines[2:4]] == [["2", "16"], ["16", "16"]]
    height = height_of(picture)
    said = capsys.readouterr()
    assert said.out == ""
    begun = [f"simulated {number} process(es), ddp: peak " for number in (2, 16)]
    assert [line[: len(part)] for line, part in zip(said.err.splitlines(), begun, strict=True)] == begun

    def stop_at_16(request: Launch, _: Options) -> Any:
        if request.num_processes == 16:
            raise KeyboardInterrupt
        return of(2)

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(command, "_simulate_one", stop_at_16)
        simulate("mmdit", SMALL, asked)
    said = capsys.readouterr()
    assert said.out.startswith("one of 2 process(es), ddp, ")
    assert said.err.endswith("only 1 of 2 numbers of processes were simulated\n")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full, pytest.raises(UsageError, match=r"picture: .*\(No space left on device\)"):
        full.setattr(command, "draw", fail)
        simulate("mmdit", SMALL, asked)
    assert capsys.readouterr().out.splitlines() == lines
    assert "time" not in json.loads(simulate("mmdit", SMALL, replace(asked, as_json=True)))[0]

    named = replace(asked, device="h100-sxm", link="infiniband-ndr")
    timed = simulate("mmdit", SMALL, named).splitlines()
    assert [line.split()[-3:] for line in timed[1:2]] == [["step", "exposed", "efficiency"]]
    assert [line.split()[:8] for line in timed[2:4]] == [line.split()[:8] for line in lines[2:4]]
    assert timed[2].endswith(" 100.0%")
    assert timed[-1].startswith("pays up to ")
    # A second panel under the first.
    assert height_of(picture) > 1.5 * height
    shown = json.loads(simulate("mmdit", SMALL, replace(named, as_json=True)))
    assert shown[0]["scaling"]["efficiency"] == 1.0
    assert {one["origins"]["time"] for one in shown} == {"modelled"}
    assert f"{shown[1]['scaling']['efficiency']:.1%}" == timed[3].split()[-1]
    described = simulate("mmdit", SMALL, replace(named, num_processes=(16,)))
    assert f"{shown[1]['time']['seconds']['total'] * 1e3:.2f} ms" in described

    found = json.loads(simulate("mmdit", SMALL, Options(None, (2,), None, None, True, None)))
    (process,) = found
    assert process["origins"]["held"] == "exact"
    assert process["origins"]["peak_in_blocks"] == "modelled"
    largest = max(sum(v for k, v in point.items() if k != "place") for point in process["curve"])
    assert largest == process["peak"]["total"]
