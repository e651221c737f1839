"""Save checkpoints in one form under every strategy: plain names, fp32, safetensors and JSON.

``Saver.save`` returns after the snapshot. A writer process then writes, hashes and flushes it in the background. The
ranks agree at a later step boundary that it is complete. Collectives stay on the main thread.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from accel_train.checkpoints import contents, policy, snapshot
from accel_train.checkpoints.background import Writer
from accel_train.checkpoints.pending import REDUCTIONS, Attempt, Buffers, PendingSave, Phase, try_extras, write_error
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.run import Run
from accel_train.hub.options import HubConfig
from accel_train.hub.pusher import Pusher
from accel_train.runtime.hosts.lost import explain
from accel_train.runtime.signals import Agreement, StopRequests
from accel_train.runtime.strategy import layout_of
from accel_train.store import commit, failpoints, planning
from accel_train.store.manifest import Checkpoint, checkpoint_name
from accel_train.training.ema import Ema

logger = logging.getLogger(__name__)


class Saver:
    """Saves the checkpoints of one run. A context manager, built and called on every rank at the same steps.

    ``write_extras`` writes the files needed for sampling into a new directory, on the main process: ``config.json``,
    and a folder ``assets`` if there are more. It is tried at the start. A pickle is left out with a warning.
    ``on_commit`` is called there with every committed checkpoint. ``epoch`` converts a number of steps to epochs.
    """

    _writer: Writer | None = None
    _snapshot: Buffers | None = None
    _extents: list[Any] | None = None
    _pending: PendingSave | None = None
    _number = 0
    """Number of the last save begun."""
    _saved_step = -1
    """Step of the last save or of the resume."""
    _save_by_clock = False
    _stopping = False
    _last_failure: str | None = None

    def __init__(
        self,
        accelerator: Accelerator,
        run: Run,
        ema: Ema,
        config: CheckpointConfig,
        hub_config: HubConfig,
        write_extras: Callable[[Path], None] | None,
        *,
        epoch: Callable[[int], float],
        on_commit: Callable[[Checkpoint], None] = lambda _: None,
    ) -> None:
        # Checked at the start, not hours later at the first save.
        contents.refuse_unsavable(ema.shards, run)
        self._accelerator = accelerator
        self._run = run
        self._config = config
        self._shards = ema.shards
        self._ema = ema
        self._write_extras = write_extras or (lambda _: None)
        self._epoch = epoch
        self._on_commit = on_commit
        self._rank = accelerator.process_index
        self._main = accelerator.is_main_process
        self._agreement = Agreement(accelerator, REDUCTIONS, run.timeout_seconds)
        trial = Attempt(run.start_step, run.checkpoints, self._agreement.gather)
        try_extras(trial, self._write_extras if self._main else None)
        self._layout = layout_of(accelerator)
        self._pusher = Pusher(
            run.directory, hub_config, is_main=self._main, best_metric=config.best_metric, best_mode=config.best_mode
        )
        self._requests = StopRequests(run.directory, main=self._main, alone=accelerator.num_processes == 1)
        self._status = dict.fromkeys(REDUCTIONS, 0)
        """Values of this rank for the next exchange."""
        self._last_save = time.monotonic()
        if run.checkpoint is not None:
            self._saved_step = run.start_step
            # The last process may have died after the commit and before it offered the checkpoint to the Hub.
            self._pusher.offer(run.checkpoint)
        policy.warn_about_grace(run.checkpoint, config, self._main)

    # ------------------------------------------------------------------------------------------------ the loop's calls
    def begin(self) -> None:
        """Mark that there is work to save at a stop. Cheap. ``boundary`` calls it too."""
        self._requests.begin()

    def boundary(self, step: int) -> bool:
        """Return True to save and stop now. Call it after every step on every rank. Never waits for the device.

        Requests to stop, the clock and the progress of the write are exchanged, and take effect one step later. Commits
        a finished write, and raises ``CheckpointWriteError`` on every rank for a failed one. Raises ``RuntimeError`` if
        the loop has not updated the EMA in this step.
        """
        self._ema.require_update()
        self.begin()
        self._pusher.offer_held()
        self._take_answer(wait=False)
        if self._main:
            self._run.note_training()
            interval = 60 * self._config.minutes
            if 0 < interval <= time.monotonic() - self._last_save:
                # By number, because the answer comes a step late and must not ask for a second save.
                self._status["wanted"] = self._number + 1
        self._status["stop"] = int(self._requests.requested)
        agreed = self._agreement.exchange(self._status)
        if agreed is not None:
            self._stopping = agreed["stop"] > 0
            self._save_by_clock = agreed["wanted"] > self._number
            if self._pending is not None and self._pending.may_advance(agreed):
                self._advance()
        if self._stopping and self._main:
            logger.info("asked to stop (%s): saving after step %d", self._requests.reason or "another process", step)
        return self._stopping

    @property
    def stopping(self) -> bool:
        """True once all processes know of a request to stop."""
        return self._stopping

    def due(self, step: int, max_steps: int) -> bool:
        """Return True if a save is due after ``step`` steps. The same on every rank. Call it after ``boundary``."""
        return step == max_steps or self._save_by_clock or policy.due(self._config, step, self._epoch)

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Take a snapshot of the state after ``step`` steps and hand it to the writer. All ranks, same step.

        Finishes the previous save first. ``metrics`` go into the manifest, for ``keep_best``. Returns True to stop now,
        like ``boundary``: a request during a synchronous save needs no second save. Raises ``CheckpointWriteError`` on
        every rank if any rank could not begin, or if the previous save failed, and ``NonFiniteError`` after a step that
        ends the run.
        """
        # A bad step that the host has not read yet must not be saved.
        self._ema.guard.check()
        self.finish()
        if step == self._saved_step:
            return self._stopping
        began = time.monotonic()
        self._last_save = began
        self._number += 1
        self._save_by_clock = False
        self._pending = self._take_snapshot(step, began, metrics or {})
        if self._pending is None:
            return self._stopping
        self._take_answer(wait=False)  # submits the job, unless the device is still copying
        self._saved_step = step
        if not self._config.asynchronous:
            self.finish()
            self._release()
            # The reduction of `boundary` is a step late, and a stop during this save would ask for a second one.
            self._stopping = any(self._agreement.gather(self._stopping or self._requests.requested))
        return self._stopping

    def asked_to_stop(self) -> bool:
        """Return True if any process has a request to stop. A collective on the host: every rank must call it."""
        self._stopping = self._stopping or self._agreement.any(self._requests.requested)
        return self._stopping

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add an evaluation's metrics to the checkpoint of ``step``, for ``keep_best`` and ``hub.push: best``.

        All ranks. Does nothing if the step was not saved. A failing disk is a warning, because the checkpoint remains
        valid without them.
        """
        if not self.committed(step) or not self._main:
            return
        path = self._run.checkpoints / checkpoint_name(step)
        try:
            commit.rewrite_manifest(path, {"metrics": contents.finite_metrics(metrics)})
            self._pusher.hold(commit.open_verified(path))
        except (OSError, ValueError) as error:
            logger.warning("the metrics of step %d could not be added to its checkpoint: %s", step, error)

    def finish(self) -> None:
        """Wait until the current save is committed. All ranks. Raises like ``boundary``."""
        while self._pending is not None:
            self._take_answer(wait=True)
            self._advance()

    def committed(self, step: int) -> bool:
        """Return True if ``step`` is saved, after a wait for its commit. All ranks. Raises like ``boundary``."""
        self.finish()
        return self._saved_step == step

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Finish the current save, unless an error ends the run: other ranks may then wait in another collective."""
        explain(error)
        # A single process waits for no other, so after an error of the loop it still commits the previous save.
        is_alone = self._accelerator.num_processes == 1
        try:
            if kind is None or (is_alone and not issubclass(kind, commit.CheckpointWriteError)):
                self.finish()
            if kind is None:
                self._end_run()
        finally:
            self._close(hurry=kind is not None or self._stopping)

    def _end_run(self) -> None:
        """Report a failed final save, and wait for the Hub."""
        if self._last_failure is not None:
            raise write_error(self._last_failure)
        self._agreement.close()
        self._pusher.offer_held()
        self._pusher.finish(preempted=self._stopping, asked_to_stop=lambda: self._requests.requested)
        if self._main and self._pusher.broken_off:
            self._stopping = True

    def _close(self, *, hurry: bool) -> None:
        if self._writer is not None and self._pending is None:
            self._writer.settle(self._requests, hurry=hurry)
        self._pusher.close()
        self._requests.close()
        # The writer ends before the directory is deleted, because it may be about to rename it.
        if self._writer is not None:
            self._writer.close(kill=self._pending is not None)
        if self._pending is not None and self._main:
            # Its writer was killed halfway, so nothing can use it.
            shutil.rmtree(self._pending.temporary, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------- beginning
    def _take_snapshot(self, step: int, began: float, metrics: Mapping[str, float]) -> PendingSave | None:
        """Copy the state and build the writer's job. None if any rank could not. A collective."""
        attempt = Attempt(step, self._run.checkpoints, self._agreement.gather)
        planned = self._prepare(step, attempt)
        attempt.needed_bytes = sum(planned.sizes)
        temporary, extras = self._make_directory(attempt)
        if temporary is None:
            return self._give_up(attempt)
        # Read before the snapshot is on its way to the host: a copy of a few bytes would queue up behind it.
        counts = self._shards.step_counts()
        random_states = self._copy(attempt)
        if random_states is None:
            return self._give_up(attempt)
        # May be a collective, so every rank builds them.
        texts = contents.texts(self._accelerator, self._ema, self._config, planned, step, counts, random_states)
        assert self._snapshot is not None
        job = attempt.write_job(temporary, self._rank, self._snapshot.files, hurry=self._stopping)
        if self._main:
            job |= {"texts": texts, "extras": extras}
        layout = self._layout
        manifest = contents.manifest(self._run, self._config, self._shards, step, self._epoch(step), layout, metrics)
        return PendingSave(self._number, step, temporary, manifest, began, attempt.needed_bytes, job)

    def _prepare(self, step: int, attempt: Attempt) -> planning.Plan:
        """Plan the save and allocate its buffers. Later saves reuse them until the optimizer state has other keys."""
        keys: dict[str, list[str]] = {}
        if step > 0 and self._config.save_state:
            keys = self._shards.state_names()
        if self._writer is not None and self._snapshot is not None and self._snapshot.keys == keys:
            return self._snapshot.plan
        names = contents.saved_names(self._shards, self._run)
        collections = contents.collections(self._shards, self._ema, self._config, keys, names)
        if self._extents is None and not self._shards.replicated:
            self._extents = self._agreement.gather({name: self._shards.extent(name) for name in names})
        planned = contents.plan(self._shards, collections, names, self._accelerator.num_processes)
        with attempt.part():
            # The old buffers go first: both at once would need twice the host memory.
            self._release()
            self._writer = Writer(planned.sizes[self._rank])
            taken = snapshot.Snapshot(
                planned, collections, self._writer.buffer, self._extents, self._rank, self._agreement.group
            )
            files = planned.jobs(self._rank, collections, self._shards.shape)
            self._snapshot = Buffers(keys, planned, files, taken)
        return planned

    def _make_directory(self, attempt: Attempt) -> tuple[Path | None, list[str]]:
        """Return the temporary directory, made by the main process, and its extra files there. A collective."""
        extras: list[str] = []
        with attempt.part():
            if self._main and attempt.error is None:
                attempt.temporary, extras = self._run.begin_checkpoint(
                    attempt.step, self._write_extras, state=self._config.save_state
                )
        directories = attempt.agree(attempt.temporary) or [None]
        return directories[0], extras

    def _copy(self, attempt: Attempt) -> list[Any] | None:
        """Take the snapshot. Returns the random states of all ranks, None if any has failed. A collective."""
        # Only one value of each buffer is saved, and a resume gives it to every rank.
        self._shards.agree_on_buffers()
        assert self._snapshot is not None
        with attempt.part(alone=self._shards.replicated or self._accelerator.num_processes == 1):
            self._snapshot.snapshot.take()
            failpoints.hit("after_snapshot", self._rank)
        return attempt.agree(contents.random_state())

    def _give_up(self, attempt: Attempt) -> None:
        """Raise or report the failure of a save that no writer has begun. Every rank."""
        attempt.discard()
        error = attempt.error
        if error is not None and attempt.ran_out_of_memory and self._config.on_error == "stop":
            raise error  # the loop records it, and explains it
        # Breaks a reference cycle: the error holds the frames of this save, and these hold the error.
        attempt.error = None
        self._report_failure(attempt.step, attempt.reason, error)

    # ------------------------------------------------------------------------------------------------------- finishing
    def _take_answer(self, *, wait: bool) -> None:
        """Submit the job once the snapshot is complete, or take the writer's answer and report it to the others."""
        pending = self._pending
        if pending is None or self._writer is None or self._snapshot is None:
            return
        if pending.phase is Phase.COPYING:
            if not self._snapshot.snapshot.ready(wait=wait):
                return
            self._writer.submit(pending.job)
            pending.phase = Phase.WRITING
        if pending.answer is not None or not self._writer.busy:
            return
        pending.answer = self._writer.answer(wait=wait)
        if pending.answer is None:
            return
        self._status[pending.outcome()] = pending.number

    def _advance(self) -> None:
        """Enter the next phase after the answers of all writers. Every rank."""
        pending = self._pending
        assert pending is not None
        self._take_answer(wait=True)
        answers = self._agreement.gather(pending.answer)
        errors = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if a and "error" in a]
        if errors:
            self._discard("; ".join(errors))
        elif pending.phase is Phase.COMMITTING:
            self._acknowledge()
        else:
            files = {name: file for answer in answers for name, file in answer["files"].items()}
            self._commit(pending, files)

    def _commit(self, pending: PendingSave, files: Mapping[str, Any]) -> None:
        """Make the main process's writer commit and delete old checkpoints."""
        pending.manifest["seconds"] = round(time.monotonic() - pending.began, 3)
        pending.manifest["files"] = dict(sorted(files.items()))
        pending.phase = Phase.COMMITTING
        pending.answer = None
        if self._main:
            assert self._writer is not None
            # Retention must not delete what the queue of the Hub still names.
            queue = self._run.directory / "hub" / "queue"
            self._writer.submit(pending.commit_job(asdict(self._config), queue))

    def _acknowledge(self) -> None:
        pending = self._pending
        assert pending is not None
        self._pending = None
        self._last_failure = None
        if self._main:
            saved = Checkpoint(self._run.checkpoints / checkpoint_name(pending.step), pending.step, pending.manifest)
            logger.info("saved %s in %.1f s", saved.path, pending.manifest["seconds"])
            self._on_commit(saved)
            self._pusher.hold(saved)

    def _release(self) -> None:
        """End the writer and free its memory."""
        if self._writer is not None:
            self._writer.settle(self._requests, hurry=self._stopping)
            self._writer.close(kill=self._writer.broken)
        self._writer = None
        self._snapshot = None

    def _discard(self, reason: str) -> None:
        """Discard a failed save. Every rank."""
        pending = self._pending
        assert pending is not None
        self._pending = None
        if self._saved_step == pending.step:
            self._saved_step = -1  # `save` may try this step again
        if self._writer is not None and self._writer.broken:
            self._release()
        answer = pending.answer or {}
        # A complete directory that could not be renamed is left for the user. The next start sweeps it.
        if self._main and not answer.get("complete"):
            shutil.rmtree(pending.temporary, ignore_errors=True)
        self._report_failure(pending.step, reason)

    def _report_failure(self, step: int, reason: str, error: Exception | None = None) -> None:
        """Raise, from this rank's ``error``, or warn and remember it, in case this was the final save. Every rank."""
        if self._config.on_error == "stop":
            raise write_error(reason) from error
        self._last_failure = reason
        logger.warning("checkpoint of step %d was not saved; training continues: %s", step, reason)
