"""Out of memory: the smaller micro-batch size to continue a run with.

The gradient does not depend on the micro-batch (``training/accumulation.py``), so half of it gives the same samples,
noise and learning rate in half the activations. A process cannot continue where it ran out: the step is half done, the
other processes wait for it in a reduction, and the allocator's memory is fragmented. So the size is recorded in the run
directory, and the next start continues from the newest checkpoint with it.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from accel_train.store import atomic_files, strict_json
from accel_train.store.names import MICRO_BATCH_FILE

Part = Literal["step", "evaluation", "save"]
"""Part of the training loop. Only a step needs less memory with a smaller micro-batch."""
MAX_BYTES = 1 << 16
UNTYPED = (
    "DefaultCPUAllocator: can't allocate memory",
    # Workspaces that CUDA's libraries allocate beside torch's allocator.
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    # Of the runtime itself, as when it loads a kernel at its first call, and of NCCL's buffers: Cuda failure 2 '...'.
    "CUDA error: out of memory",
    "'out of memory'",
)
"""Texts of memory errors for which torch has no type but ``RuntimeError``."""
OTHER_MEANS = (
    "--activation_checkpointing.mode full, --optimizer.name adamw_offload, or a launch file that shards "
    "(docs/machines.md, When memory runs out)"
)


class SmallerMicroBatch(NamedTuple):
    """Requested micro-batch size, and the one in use."""

    asked: int
    used: int
    step: int
    """The last step that ran out of memory."""
    tries: int
    """Number of times that it was doubled again so far."""
    since: int
    """The step before which this size came into use."""

    def notice(self, directory: Path) -> str:
        """Return the log line of a start."""
        return (
            f"micro_batch_size: {self.used} instead of {self.asked}, because step {self.step} ran out of memory; "
            "samples, noise and learning rate are the same. To try again, give another --micro_batch_size or delete "
            f"{directory / MICRO_BATCH_FILE}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of torch's allocator or CUDA's libraries, of a device or of host memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in UNTYPED)


def ran_out(error: BaseException, part: Part) -> bool:
    """Return True if ``part`` ran out of memory.

    A save also allocates host memory from the operating system itself. In a step such an error is that of a worker or
    a file, and tells nothing about the micro-batch.
    """
    if is_out_of_memory(error):
        return True
    return part == "save" and (isinstance(error, MemoryError) or _is_enomem(error))


def _is_enomem(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def recorded(directory: Path, asked: int) -> SmallerMicroBatch | None:
    """Return the record of an earlier start for a micro-batch of ``asked`` samples, or None.

    A record that cannot be read counts as none: the run then meets the same error once more, and records it again.
    """
    record = _read(directory, asked)
    if record is None or record.used == asked:
        return None
    return record


def _read(directory: Path, asked: int) -> SmallerMicroBatch | None:
    """Return the record even if the requested size is in use again."""
    try:
        found = strict_json.read_object(directory / MICRO_BATCH_FILE, MAX_BYTES)
        record = SmallerMicroBatch(*(int(found[name]) for name in SmallerMicroBatch._fields))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # A user who requests another size has seen the record, so it no longer applies.
    if record.asked != asked or not 1 <= record.used <= asked:
        return None
    return record


def record_half(directory: Path, asked: int, used: int, step: int) -> SmallerMicroBatch:
    """Record half of the micro-batch in ``used`` for the next start. Any process that ran out may call it."""
    assert used > 1, "a micro-batch of one sample cannot be halved"
    earlier = _read(directory, asked)
    record = SmallerMicroBatch(asked, used // 2, step, earlier.tries if earlier else 0, step)
    _write(directory, record)
    return record


def is_time_to_double(record: SmallerMicroBatch, regrow_after: int, done: int) -> bool:
    """Return True if enough steps were done with the micro-batch in use to try twice its size.

    ``regrow_after`` doubles with each try, so that a run whose memory never suffices does not restart forever.
    """
    return done - record.since >= regrow_after << record.tries


def record_double(directory: Path, record: SmallerMicroBatch, done: int) -> None:
    """Record twice the micro-batch in use, at most the requested one, for the next start. Main process.

    Raises ``OSError``.
    """
    used = min(2 * record.used, record.asked)
    _write(directory, record._replace(used=used, tries=record.tries + 1, since=done))


def _write(directory: Path, record: SmallerMicroBatch) -> None:
    # Processes that run out in the same step write the same bytes, and one of them may find the rename already done.
    with suppress(FileNotFoundError):
        atomic_files.replace_json(directory / MICRO_BATCH_FILE, record._asdict())


def explain(used: int, step: int, *, global_batch_size: int) -> str:
    """Return advice about running out of memory in step ``step``, for an error ending the run."""
    if used > 1:
        return (
            f"step {step} ran out of memory with micro_batch_size {used}: give --micro_batch_size {used // 2}, which "
            f"keeps the global batch of {global_batch_size} and the curve, or --out_of_memory halve"
        )
    return f"step {step} ran out of memory with a micro-batch of one sample: use {OTHER_MEANS}"


def explain_evaluation(step: int) -> str:
    """Return advice about an evaluation, for an error ending the run."""
    return (
        f"the evaluation after step {step} ran out of memory; have it take fewer samples at once: give a smaller "
        "--evaluation.batch_size, or, if that is not set, a smaller --micro_batch_size"
    )


def explain_save(error: BaseException, step: int) -> str:
    """Return advice about a save, for an error ending the run. Only what a resume may change is advised."""
    if isinstance(error, torch.OutOfMemoryError):
        memory = "device"
        remedies = "--memory.expandable_segments true, a launch file that shards over more devices"
    else:
        memory = "host"
        remedies = "fewer processes on this host, a smaller --loader.num_workers, more memory for the host or container"
    return (
        f"the save of step {step} ran out of {memory} memory. A smaller micro-batch would not make it smaller, so "
        "nothing was halved; checkpoints saved before are complete, and the same command continues from the newest. "
        f"Make room for the save: {remedies}, or --checkpoints.save_state false, which saves only weights and EMA, "
        "from which no run can resume"
    )
