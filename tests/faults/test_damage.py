"""Files that were torn, changed, lost or moved, hosts that see them late, clocks that jump, and changed experiments."""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

from accel_train.metrics.progress import LogConfig
from accel_train.metrics.recorder import Recorder
from accel_train.metrics.records import read_metrics
from accel_train.metrics.throughput import Throughput
from accel_train.store import commit, manifest
from tests.faults.harness import EVERY, ROOT, Trainers, checkpoints, damage, debris, losses, same_run, writer_patch


@pytest.fixture
def half(trainers: Trainers, out: Path) -> Path:
    """A run of one process stopped at step 10: checkpoints of 5 and 10."""
    trainers.stopped(out, 10)
    return out


def newest(out: Path) -> Path:
    return manifest.committed(out / "checkpoints")[-1][1]


# -------------------------------------------------------------------------------------------------- damaged checkpoints
def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def replace_text(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        pytest.param(
            lambda p: damage(p / "model.safetensors", cut=100),
            "model.safetensors has",
            marks=pytest.mark.fault(
                "F32",
                injected="a file cut short (power loss)",
                outcome="reported; falls back to the previous checkpoint",
            ),
            id="cut",
        ),
        pytest.param(
            lambda p: (p / "ema.safetensors").write_bytes(b""),
            "ema.safetensors has 0 bytes, the manifest says",
            marks=[
                pytest.mark.slow,  # cut shorter than above
                pytest.mark.fault(
                    "F32",
                    injected="a file emptied (power loss)",
                    outcome="reported; falls back to the previous checkpoint",
                ),
            ],
            id="emptied",
        ),
        pytest.param(
            lambda p: damage(p / "model.safetensors", flip=True),
            "model.safetensors has changed since it was written (sha256 differs)",
            marks=pytest.mark.fault(
                "F33",
                injected="one bit of the weights flipped",
                outcome="reported; falls back to the previous checkpoint",
            ),
            id="weights",
        ),
        pytest.param(
            lambda p: damage(p / "optimizer" / "exp_avg.safetensors", flip=True),
            "optimizer/exp_avg.safetensors has changed since it was written",
            marks=[
                pytest.mark.slow,  # hashed as the weights are
                pytest.mark.fault(
                    "F34",
                    injected="one bit of the optimizer flipped",
                    outcome="reported; falls back to the previous checkpoint",
                ),
            ],
            id="optimizer",
        ),
        pytest.param(
            lambda p: damage(p / "trainer_state.json", flip=True),
            "trainer_state.json has changed since it was written",
            marks=pytest.mark.fault(
                "F34",
                injected="one bit of the random state flipped",
                outcome="reported; falls back to the previous checkpoint",
            ),
            id="random_state",
        ),
        pytest.param(
            lambda p: (p / "optimizer" / "exp_avg_sq.safetensors").unlink(),
            "optimizer/exp_avg_sq.safetensors is missing",
            marks=pytest.mark.fault(
                "F35", injected="a file deleted", outcome="reported; falls back to the previous checkpoint"
            ),
            id="missing",
        ),
        pytest.param(
            lambda p: (p / "manifest.json").unlink(),
            "no manifest.json, so it is not a committed checkpoint",
            marks=pytest.mark.fault(
                "F36", injected="no manifest", outcome="not a checkpoint; falls back to the previous one"
            ),
            id="no_manifest",
        ),
        pytest.param(
            lambda p: damage(p / "manifest.json", cut=200),
            "manifest.json cannot be read (it is not JSON",
            marks=pytest.mark.fault(
                "F36", injected="a manifest that is no JSON", outcome="reported; falls back to the previous checkpoint"
            ),
            id="invalid_manifest",
        ),
        pytest.param(
            lambda p: rewrite(p / "manifest.json", lambda m: m.update(schema=3, accel_train="9.1.0")),
            "schema 3 was written by accel_train 9.1.0; this one reads 2",
            marks=pytest.mark.fault(
                "F36", injected="a manifest of a newer schema", outcome="the error says which version wrote it"
            ),
            id="newer_schema",
        ),
        pytest.param(
            lambda p: replace_text(p / "manifest.json", '"step": 10', '"step": 12'),
            "manifest.json cannot be read (it has changed since it was written (self_sha256 differs))",
            marks=pytest.mark.fault(
                "R1",
                injected="one bit of the manifest's step",
                outcome="reported; falls back to the previous checkpoint",
            ),
            id="step",
        ),
        pytest.param(
            lambda p: ((p / "manifest.json").unlink(), os.mkfifo(p / "manifest.json")),
            "manifest.json cannot be read (it is a FIFO, not a regular file)",
            marks=pytest.mark.fault(
                "R1",
                injected="a FIFO for the manifest",
                outcome="reported; falls back to the previous checkpoint; no hang",
            ),
            id="fifo",
        ),
    ],
)
def test_an_older_checkpoint_is_used(
    trainers: Trainers, half: Path, whole: Path, harm: Callable[[Path], object], reason: str
) -> None:
    harm(newest(half))
    run = trainers.run(half, *EVERY)
    assert run.wait() == [0], run.output()
    assert f"resuming {half} at step 5; newer checkpoints were refused: {newest(half).parent}" in run.output()
    assert reason in run.output()
    assert checkpoints(half) == [15, 20]
    assert debris(half) == []
    same_run(half, whole)


@pytest.mark.fault(
    "R2",
    injected="a file and a link to one where the next checkpoints go",
    outcome="set aside and reported; training continues",
)
def test_something_stands_where_the_next_checkpoints_go(trainers: Trainers, half: Path, whole: Path) -> None:
    folder = half / "checkpoints"
    (folder / "checkpoint_00000015").write_text("mine")
    (folder / "checkpoint_00000020").symlink_to("/dev/null")
    run = trainers.run(half, *EVERY)
    assert run.wait() == [0], run.output()
    assert checkpoints(half) == [15, 20]
    (file,) = folder.glob("checkpoint_00000015.aside-*")
    (link,) = folder.glob("checkpoint_00000020.aside-*")
    assert (file.read_text(), os.readlink(link)) == ("mine", "/dev/null")
    assert f"is set aside as {file}" in run.output()
    same_run(half, whole)


@pytest.mark.fault(
    "F35", injected="a file that nobody listed", outcome="a warning; the file is not read; the checkpoint is used"
)
def test_an_extra_file(trainers: Trainers, half: Path, whole: Path) -> None:
    (newest(half) / "optimizer" / "notes.pt").write_bytes(b"cos\nsystem\n(S'touch /tmp/canary'\ntR.")
    run = trainers.run(half, *EVERY)
    assert run.wait() == [0]
    assert f"resuming {half} at step 10" in run.output()
    assert "contains files that its manifest does not list; they are not read: ['optimizer/notes.pt']" in run.output()
    same_run(half, whole)


def test_a_start_that_is_refused_after_loading_does_not_count_against_the_checkpoint(
    trainers: Trainers, half: Path, whole: Path
) -> None:
    patch = """
from accel_train.checkpoints import restore
from accel_train.config import UsageError
original = restore.load_initial_weights
def load(model, run):
    original(model, run)
    raise UsageError("an option that cannot be obeyed")
restore.load_initial_weights = load
"""
    for _ in range(4):
        assert trainers.run(half, *EVERY, patch=patch).wait() == [2]
    run = trainers.run(half, *EVERY)
    assert run.wait() == [0], run.output()
    assert f"resuming {half} at step 10" in run.output()
    assert not (half / "loading.json").exists()
    same_run(half, whole)


@pytest.mark.fault(
    "F37", injected="every checkpoint damaged", outcome="exit 1 with each reason; never restarts from step 0"
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])  # one process decides for all
def test_all_checkpoints_damaged(trainers: Trainers, half: Path, ranks: int) -> None:
    before = losses(half)
    damage(half / "checkpoints" / "checkpoint_00000005" / "ema.safetensors", flip=True)
    (half / "checkpoints" / "checkpoint_00000010" / "model.safetensors").unlink()
    for resume in ("auto", "must"):
        run = trainers.run(half, *EVERY, "--resume", resume, ranks=ranks)
        assert set(run.wait()) == {1}
        assert "checkpoints exist and none can be loaded; refusing to restart from step 0" in run.output()
        assert "checkpoint_00000005: ema.safetensors has changed since it was written" in run.output()
        assert "checkpoint_00000010: model.safetensors is missing" in run.output()
    assert losses(half) == before
    assert len(manifest.committed(half / "checkpoints")) == 2


@pytest.mark.parametrize(
    "crash",
    [
        pytest.param(
            "os.kill(os.getpid(), 9)",
            marks=pytest.mark.fault(
                "F38",
                injected="3 starts killed while loading",
                outcome="set aside as .bad; falls back to the previous checkpoint",
            ),
        ),
        pytest.param(
            "raise RuntimeError('the user cannot load this')",
            marks=[
                pytest.mark.slow,  # as killed
                pytest.mark.fault(
                    "F38",
                    injected="3 starts that raise while loading",
                    outcome="set aside as .bad; falls back to the previous checkpoint",
                ),
            ],
        ),
    ],
)
def test_a_checkpoint_that_crashes_the_start(trainers: Trainers, half: Path, whole: Path, crash: str) -> None:
    patch = f"""
import os
from accel_train.store import weights
original = weights.load_weights
def load(directory, stem, model, **named):
    original(directory, stem, model, **named)
    if directory.name.endswith("10"):
        {crash}
weights.load_weights = load
"""
    for _ in range(3):
        run = trainers.run(half, *EVERY, patch=patch)
        assert run.wait()[0] in (-9, 1)
        assert checkpoints(half) == [5, 10]
    run = trainers.run(half, *EVERY, patch=patch)
    assert run.wait() == [0], run.output()
    assert "3 starts ended while it was being loaded; it is set aside" in run.output()
    assert f"resuming {half} at step 5" in run.output()
    assert debris(half) == ["checkpoint_00000010.bad"]
    same_run(half, whole)


def test_two_crashes_are_not_enough(trainers: Trainers, half: Path, whole: Path) -> None:
    patch = (
        "import os; from accel_train.checkpoints import restore; restore.restore = lambda *a: os.kill(os.getpid(), 9)"
    )
    for _ in range(2):
        assert trainers.run(half, *EVERY, patch=patch).wait() == [-9]
    run = trainers.run(half, *EVERY)
    assert run.wait() == [0]
    assert f"resuming {half} at step 10" in run.output()
    same_run(half, whole)
    assert not (half / "loading.json").exists()


NO_ROOM = """
import errno
from accel_train.store import atomic_files
def full(path, value):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))
atomic_files.replace_json = full
"""


@pytest.mark.fault(
    "R5", injected="an OSError of rank 0 while it opens the run", outcome="every rank ends at once, with its message"
)
def test_rank_0_fails_while_it_opens_the_run(trainers: Trainers, out: Path) -> None:
    began = time.monotonic()
    run = trainers.run(out, *EVERY, "--collective_timeout_seconds", "600", ranks=2, patch=NO_ROOM, timeout=300)
    assert run.wait() == [1, 1]
    assert time.monotonic() - began < 300  # and not after the timeout of collectives
    assert (
        run.output().count("]: OSError: [Errno 28] No space left on device") == 2
    )  # torch puts [rankN]: before each line, run.output()


# ------------------------------------------------------------------------------------------------ shared directories
@pytest.mark.fault("F39", injected="a second run in the same directory", outcome="exit 2, naming process and host")
def test_two_runs_in_one_directory(trainers: Trainers, out: Path, whole: Path, tmp_path: Path) -> None:
    first = trainers.start(out, *EVERY, "--pause_at", "3")
    first.until_step(3)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run").symlink_to(out)  # by another name, and with its own log
    second = trainers.run(tmp_path / "elsewhere" / "run", *EVERY)
    assert second.wait() == [2]
    holder = f"is in use by process {first.pids[0]} on {socket.gethostname()}; give another --output_dir"
    assert holder in second.output()
    first.go()
    assert first.wait() == [0]
    same_run(out, whole)


@pytest.mark.fault("F40", injected="the lock of a run that was killed", outcome="ignored")
def test_a_stale_lock(trainers: Trainers, out: Path, whole: Path) -> None:
    run = trainers.start(out, *EVERY, "--pause_at", "7")
    run.until(out / "acknowledged.txt", "5")
    run.kill()
    run.wait()
    assert "process" in (out / ".lock").read_text()
    (out / ".lock").write_text("process 1 on elsewhere\n")
    assert trainers.run(out, *EVERY).wait() == [0]
    same_run(out, whole)


@pytest.mark.fault("F40", injected="an unfinished save of another host", outcome="reported and left alone")
def test_an_unfinished_save_of_another_host(trainers: Trainers, half: Path, whole: Path) -> None:
    foreign = half / "checkpoints" / ".tmp-checkpoint_00000015-elsewhere-1-abc123"
    foreign.mkdir()
    run = trainers.run(half, *EVERY)
    assert run.wait() == [0]
    assert f"1 unfinished save(s) of other hosts remain in {foreign.parent}" in run.output()
    assert f"{foreign.name}; once these have ended, `accel-train checkpoints prune {half}`" in run.output()
    assert debris(half) == [foreign.name]
    same_run(half, whole)


def test_debris_of_a_process_whose_number_was_given_again(trainers: Trainers, half: Path) -> None:
    """In a container the next start is process 1, or 7, again."""
    mine = half / "checkpoints" / commit.temporary_name(15, "abc123")
    mine.mkdir()
    os.utime(mine, (1.6e9, 1.6e9))  # before this process began
    assert trainers.run(half, *EVERY).wait() == [0]
    assert debris(half) == []


BLIND = """
import os
real = {name: getattr(os, name) for name in ("stat", "listdir", "scandir", "open")}
seen = {}
def lie(name, path, *arguments, **options):
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if "OUT" in text and "SUCH" in text and "logs" not in text:
        seen[name, text] = seen.get((name, text), 0) + 1
        if seen[name, text] <= 4:
            raise FileNotFoundError(2, "not yet", text)
    return real[name](path, *arguments, **options)
for name in NAMES:
    setattr(os, name, lambda path=".", *a, name=name, **o: lie(name, path, *a, **o))
"""


@pytest.mark.fault(
    "F29", injected="rank 1 sees every new name late (as on NFS)", outcome="rank 1 waits; rank 0 alone decides"
)
def test_names_that_are_seen_late(trainers: Trainers, out: Path, whole_of_two: Path, tmp_path: Path) -> None:
    blind = BLIND.replace("OUT", f"{out}/")
    looks = blind.replace("NAMES", '("stat", "listdir", "scandir")').replace("SUCH", "")
    environment = writer_patch(tmp_path / "patch", blind.replace("NAMES", '("open",)').replace("SUCH", "-00002-of"))
    trainer = f'import os\nif os.environ["RANK"] == "1":\n    exec({looks!r}, {{}})'
    for steps in ("10", "20"):
        run = trainers.run(out, *EVERY, "--max_steps", steps, ranks=2, patch=trainer, **environment)
        assert run.wait() == [0, 0], run.output()
    assert "at step 10" in run.output()
    same_run(out, whole_of_two)


# ------------------------------------------------------------------------------------------------ other machines, times
def test_other_threads_of_a_process_that_is_not_the_main_one_are_said(trainers: Trainers, out: Path) -> None:
    uneven = "import os, torch; torch.set_num_threads(1 + int(os.environ['RANK']))"
    first = trainers.run(out, *EVERY, "--max_steps", "10", ranks=2, patch=uneven)
    assert first.wait() == [0, 0], first.output()
    assert manifest.read(out / "checkpoints" / "checkpoint_00000010")["layout"]["threads"] == [1, 2]
    run = trainers.run(out, *EVERY, ranks=2)
    assert run.wait() == [0, 0], run.output()
    assert "floating-point reductions differs (threads 2 -> 1 (process 1))" in run.output()


@pytest.mark.fault(
    "F41",
    injected="2 -> 1, 1 -> 2, 2 -> 3 processes (DDP)",
    outcome="losses within 1e-6; the log says that it is not bit-exact",
)
@pytest.mark.parametrize(("first", "second"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow), (2, 3)])
def test_another_number_of_processes(
    trainers: Trainers, out: Path, whole: Path, whole_of_two: Path, first: int, second: int
) -> None:
    trainers.stopped(out, 10, first)
    run = trainers.run(out, *EVERY, ranks=second)
    assert set(run.wait()) == {0}, run.output()
    assert "not bit-exact: the order of floating-point reductions differs" in run.output()
    assert f"world_size {first} -> {second}" in run.output()
    expected = losses(whole if first == 1 else whole_of_two)
    found = losses(out)
    assert {s: found[s] for s in range(1, 11)} == {s: expected[s] for s in range(1, 11)}
    for step in range(11, 21):
        a, b = float.fromhex(found[step]), float.fromhex(expected[step])
        assert a == pytest.approx(b, rel=1e-6), step


def test_the_same_number_of_processes_is_said_to_be_exact(trainers: Trainers, half: Path) -> None:
    run = trainers.run(half, *EVERY)
    assert "bit-exact: the same layout as when it was saved" in run.output()
    assert "not bit-exact" not in run.output()


OTHER_DATA = """
from accel_train.checkpoints import opening
original = opening.open_run
opening.open_run = lambda options, accelerator, data: original(options, accelerator, "other data")
"""


@pytest.mark.fault(
    "F45",
    injected="seed, batch, architecture or data changed",
    outcome="exit 2 with both values; --allow KEY continues",
)
@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("seed", "0", "1"),
        ("global_batch_size", "8", "16"),
        ("hidden", "32", "33"),
        ("data_fingerprint", "'toy'", "'other data'"),
    ],
)
def test_a_changed_experiment(trainers: Trainers, half: Path, key: str, before: str, now: str) -> None:
    flags = () if key == "data_fingerprint" else (f"--{key}", now)
    patch = OTHER_DATA if key == "data_fingerprint" else ""
    refused = trainers.run(half, *EVERY, *flags, patch=patch)
    assert refused.wait() == [2]
    assert f"{key}: {before} there, {now} now" in refused.output()
    assert f"--allow {key}" in refused.output()
    assert max(losses(half)) == 10
    allowed = trainers.run(half, *EVERY, *flags, "--allow", key, patch=patch)
    if key == "hidden":  # taken on purpose, but no tensor fits
        assert allowed.wait() != [0]
        assert max(losses(half)) == 10
    else:
        assert allowed.wait() == [0], allowed.output()
        assert max(losses(half)) == 20


@pytest.mark.fault(
    "F45", injected="micro-batch, save cadence or timeout changed", outcome="allowed; training continues"
)
def test_what_may_change(trainers: Trainers, half: Path, whole: Path) -> None:
    flags = ("--micro_batch_size", "2", "--checkpoints.save_every", "7", "--collective_timeout_seconds", "90")
    run = trainers.run(half, *flags)
    assert run.wait() == [0], run.output()
    assert checkpoints(half) == [10, 14, 20]
    assert float.fromhex(losses(half)[20]) == pytest.approx(float.fromhex(losses(whole)[20]), rel=1e-5)


CLOCK = """
import time
real, calls = time.time, []
def jumping():
    calls.append(1)
    return real() + (-1) ** len(calls) * 86400 * 400
time.time = jumping
"""


@pytest.mark.fault("F49", injected="a wall clock that jumps by years", outcome="no effect on saves, retention or order")
def test_a_clock_that_jumps(trainers: Trainers, out: Path, whole: Path, tmp_path: Path) -> None:
    environment = writer_patch(tmp_path / "patch", CLOCK)
    flags = (*EVERY, "--checkpoints.save_every_minutes", "60")
    for steps in ("10", "20"):
        run = trainers.run(out, *flags, "--max_steps", steps, patch=CLOCK, **environment)
        assert run.wait() == [0], run.output()
    assert checkpoints(out) == [15, 20]
    same_run(out, whole)


def test_a_clock_that_jumps_makes_no_negative_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = time.time, list[int]()
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** len(calls) * 1e8 + 0 * (calls.append(1) or 0))
    rates = Throughput(torch.device("cpu"), world_size=1, precision="fp32")
    for _ in range(5):
        rates.update(samples=8, tokens=8, padded_tokens=8, data_wait_seconds=0.0, flops=1.0)
        time.sleep(0.002)
    assert all(value >= 0 for value in rates.read().values() if isinstance(value, float))


@pytest.mark.fault("F50", injected="file times scrambled", outcome="no effect: the step in the name decides")
def test_scrambled_times(trainers: Trainers, half: Path, whole: Path) -> None:
    chance = random.Random(0)
    for path in sorted(half.rglob("*")):
        at = chance.uniform(0, 2e9)
        os.utime(path, (at, at))
    run = trainers.run(half, *EVERY)
    assert f"resuming {half} at step 10" in run.output()
    assert checkpoints(half) == [15, 20]
    same_run(half, whole)


@pytest.mark.fault("F50", injected="the run copied elsewhere, new times, old one gone", outcome="no effect")
def test_a_copied_run(trainers: Trainers, half: Path, whole: Path) -> None:
    moved = half.with_name("moved")
    shutil.copytree(half, moved, copy_function=shutil.copyfile)
    shutil.rmtree(half)
    run = trainers.run(moved, *EVERY)
    assert f"resuming {moved} at step 10" in run.output()
    same_run(moved, whole)


# --------------------------------------------------------------------------------------------------------- the records
@pytest.fixture
def accelerator() -> Any:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


FIELDS = dict.fromkeys(
    "loss epoch lr grad_norm samples_per_second tokens_per_second step_seconds data_wait_fraction".split(), 1.0
) | {"global_batch_size": 8}


def record(accelerator: Accelerator, folder: Path, start: int, stop: int, trackers: tuple[str, ...] = ()) -> list[int]:
    """Steps of the training lines in metrics.jsonl after a start that records ``start + 1`` to ``stop``."""
    options = LogConfig(log_every=1, trackers=trackers, progress_bar="off")
    with Recorder(accelerator, folder, options, max_steps=40, start_step=start) as recorder:
        for step in range(start + 1, stop + 1):
            recorder.train(step, FIELDS)
    return [r["step"] for r in read_metrics(folder / "metrics.jsonl") if r["event"] == "train"]


@pytest.mark.fault(
    "F58", injected="metrics.jsonl ends in a torn line", outcome="dropped at the restart; each step appears once"
)
def test_a_torn_line(accelerator: Accelerator, tmp_path: Path) -> None:
    record(accelerator, tmp_path, 0, 12)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "train", "step": 13, "lo')
    assert record(accelerator, tmp_path, 10, 15) == list(range(1, 16))
    for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines():
        json.loads(line)


@pytest.mark.fault(
    "F58",
    injected="a tracker that raises",
    outcome="switched off after 3 failures in a row, with one warning; training continues",
)
def test_a_tracker_that_raises(accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    @register_tracker_class
    class Broken(GeneralTracker):
        name = "broken_in_faults"
        requires_logging_directory = False

        def __init__(self, run_name: str, **_: object) -> None:
            super().__init__()

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: object) -> None:
            pass

        def log(self, values: object, step: int | None = None, **_: object) -> None:
            calls.append(step or 0)
            raise ConnectionError("gone")

    try:
        assert record(accelerator, tmp_path, 0, 10, ("broken_in_faults",)) == list(range(1, 11))
    finally:
        LOGGER_TYPE_TO_CLASS.pop("broken_in_faults")
    assert calls == [1, 2, 3]
    assert len([r for r in caplog.records if "broken_in_faults" in r.getMessage()]) == 1


# ---------------------------------------------------------------------------------------------------------- what is not
@pytest.mark.fault(
    "F26", injected="DCP's writer thread fails (pytorch#191391)", outcome="cannot happen: DCP is not used"
)
def test_nothing_imports_torchs_distributed_checkpoint() -> None:
    """Its metadata is a pickle, and with several threads it swallows errors of the write."""
    modules = [*(ROOT / "accel_train").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    assert len(modules) > 50
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            assert not any("distributed.checkpoint" in name for name in names), path
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node).endswith("distributed.checkpoint")), path
