"""Saving: what a checkpoint holds, the same under every strategy, and when it is written, kept and given up.

Plain names, fp32, safetensors and JSON. ``Saver.save`` returns after the snapshot; a writer process writes, hashes and
flushes it behind the loop, and the ranks agree at a later step boundary that it is whole. Collectives stay on the
main thread.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from accel_train import __version__
from accel_train.checkpoints import contents, policy, snapshot
from accel_train.checkpoints.background import Writer
from accel_train.checkpoints.pending import REDUCTIONS, PendingSave, Phase
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.checkpoints.restore import layout_of
from accel_train.checkpoints.run import Run
from accel_train.hub.options import HubConfig
from accel_train.hub.pusher import Pusher
from accel_train.runtime.signals import Agreement, StopRequests, explain
from accel_train.store import commit, failpoints
from accel_train.store.commit import Checkpoint, CheckpointWriteError
from accel_train.store.manifest import checkpoint_name
from accel_train.training.ema import Ema

logger = logging.getLogger(__name__)


class Saver:
    """Saves one run. Built and called on every rank, at the same steps; a context manager that finishes what is begun.

    ``write_extras`` is called on the main process with the new directory and writes what sampling needs
    (``config.json``, and files below ``assets/``, which it makes). ``on_commit`` is called on the main process with
    every committed checkpoint, and the pusher takes it for the Hub. ``epoch`` gives the passes over the data after a
    number of steps.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run: Run,
        average: Ema,
        config: CheckpointConfig,
        hub_config: HubConfig,
        write_extras: Callable[[Path], None],
        *,
        epoch: Callable[[int], float],
        on_commit: Callable[[Checkpoint], None] = lambda _: None,
    ) -> None:
        self._accelerator, self._run, self._config = accelerator, run, config
        self._shards = average.view
        policy.refuse_uncovered(self._shards.uncovered())
        self._average = average if average.config.decay > 0 else None
        self._write_extras, self._epoch, self._on_commit = write_extras, epoch, on_commit
        self._rank, self._main = accelerator.process_index, accelerator.is_main_process
        self._agreement = Agreement(accelerator, REDUCTIONS, run.timeout_seconds)
        best, mode = config.best_metric, config.best_mode
        self._pusher = Pusher(run.directory, hub_config, is_main=self._main, best_metric=best, best_mode=mode)
        if run.checkpoint is not None:
            self._pusher.offer(run.checkpoint)  # the process may have died between its commit and its offer
        self._requests = StopRequests(run.directory, main=self._main, alone=accelerator.num_processes == 1)
        self._writer: Writer | None = None
        self._snapshot: tuple[dict[str, list[str]], snapshot.Plan, snapshot.Snapshot] | None = None
        self._pending: PendingSave | None = None
        self._number = 0
        """Of the last save that was begun."""
        self._status = dict.fromkeys(REDUCTIONS, 0)
        """What this rank tells the others."""
        self._saved_step = run.start_step if run.checkpoint is not None else -1
        self._save_by_clock = False
        self._stopping = False
        self._lost: str | None = None
        self._unoffered: Checkpoint | None = None
        """Committed, and not yet offered to the Hub: the metrics of an evaluation may join it."""
        self._last_save = time.monotonic()
        self._extents: list[Any] | None = None
        policy.warn_about_grace(run.checkpoint, config, self._main)

    # ------------------------------------------------------------------------------------------------ the loop's calls
    def begin(self) -> None:
        """This start has done work that a stop must save. Cheap; ``boundary`` calls it too."""
        self._requests.begin()

    def boundary(self, step: int) -> bool:
        """After every step, on every rank: whether to save and stop now. Never waits for the device.

        What the processes tell each other is read one step later: requests to stop, the clock, and how the write goes.
        Commits a finished write; raises ``CheckpointWriteError`` on every rank for a failed one.
        """
        self.begin()
        self._offer()
        self._take_answer(wait=False)
        if self._main:
            self._run.note_training()
        if self._main and 0 < 60 * self._config.minutes <= time.monotonic() - self._last_save:
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
        """Whether the run was asked to stop, as far as all processes know."""
        return self._stopping

    def due(self, step: int, max_steps: int) -> bool:
        """Whether to save after ``step`` steps. The same on every rank; call it after ``boundary``."""
        return step == max_steps or self._save_by_clock or policy.due(self._config, step, self._epoch)

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Take a snapshot of the state after ``step`` steps and hand it to the writer. All ranks, same step.

        The save before is finished first. ``metrics`` go into the manifest, for ``keep_best``. Returns whether to stop
        now, as ``boundary`` does: a request that came during a save that is waited for needs no second one. Raises
        ``CheckpointWriteError`` on every rank if any rank could not begin, or if the save before failed.
        """
        self.finish()
        if step == self._saved_step:
            return self._stopping
        began = self._last_save = time.monotonic()
        self._number += 1
        self._save_by_clock = False
        keys = self._shards.state_names() if step > 0 and self._config.save_state else {}
        collections = contents.collections(self._shards, self._average, self._config, keys)
        planned, taken = self._prepare(keys, collections)
        temporary, extras = self._begin(step, sum(planned.sizes))
        if temporary is None:
            return self._stopping
        taken.take()
        failpoints.hit("after_snapshot", self._rank)
        texts = self._texts(step, planned)
        needed_bytes = sum(planned.sizes)
        job = {
            "do": "write",
            "rank": self._rank,
            "directory": str(temporary),
            "files": planned.jobs(self._rank, collections, self._shards.shape),
            "texts": texts if self._main else {},
            "extras": extras,
            "needed_bytes": needed_bytes,
            "hurry": self._stopping,
        }
        manifest = self._manifest(step, metrics or {})
        self._pending = PendingSave(self._number, step, temporary, manifest, began, needed_bytes, job)
        self._take_answer(wait=False)  # submits the job, unless the snapshot is still on its way from the device
        self._saved_step = step
        if not self._config.asynchronous:
            self.finish()
            self._release()
            self._stopping = any(self._agreement.gather(self._stopping or self._requests.requested))
        return self._stopping

    def asked_to_stop(self) -> bool:
        """Whether any process has been asked to stop by now. All ranks, equally often; waits for all, on the host."""
        self._stopping = self._stopping or self._agreement.any(self._requests.requested)
        return self._stopping

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add an evaluation's metrics to the checkpoint of ``step``, for ``keep_best`` and ``hub.push: best``.

        All ranks. Does nothing where that step was not saved. A disk that fails is a warning: the checkpoint stands.
        """
        self.finish()
        if step != self._saved_step or not self._main:
            return
        path = self._run.checkpoints / checkpoint_name(step)
        try:
            commit.rewrite_manifest(path, {"metrics": contents.finite_metrics(metrics)})
            self._unoffered = commit.open_verified(path)
        except (OSError, ValueError) as error:
            logger.warning("the metrics of step %d are not in its checkpoint: %s", step, error)

    def finish(self) -> None:
        """Wait until the save that is under way is committed. All ranks. Raises as ``boundary`` does."""
        while self._pending is not None:
            self._take_answer(wait=True)
            self._advance()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Finish, unless an error leads out: then other ranks may be anywhere, and nothing collective is safe."""
        explain(error)
        alone = self._accelerator.num_processes == 1
        try:
            if kind is None or (alone and kind is not CheckpointWriteError):
                self.finish()
            if kind is None:
                if self._lost is not None:  # the last save failed: the run has not done what it was to do
                    raise CheckpointWriteError(self._lost)
                self._agreement.close()
                self._offer()
                self._pusher.finish(preempted=self._stopping, asked_to_stop=lambda: self._requests.requested)
                self._stopping = self._stopping or (self._main and self._pusher.broken_off)
        finally:
            if self._writer is not None and self._pending is None:
                self._writer.settle(self._requests, hurry=kind is not None or self._stopping)
            self._pusher.close()
            self._requests.close()
            if self._writer is not None:  # first: it may be about to give the directory its final name
                self._writer.close(kill=self._pending is not None)
            if self._pending is not None and self._main:
                shutil.rmtree(self._pending.temporary, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------- beginning
    def _prepare(
        self, keys: dict[str, list[str]], collections: Sequence[snapshot.Collection]
    ) -> tuple[snapshot.Plan, snapshot.Snapshot]:
        """Plan and buffers, made at the first save and again when the optimizer's state has appeared."""
        if self._snapshot is not None and self._snapshot[0] == keys and self._writer is not None:
            return self._snapshot[1:]
        if self._extents is None and not self._shards.replicated:
            self._extents = self._agreement.gather({n: self._shards.extent(n) for n in self._shards.parameters})
        elements = {n: self._shards.shape(n).numel() for n in self._shards.parameters}
        planned = snapshot.plan(collections, elements, self._accelerator.num_processes)
        if self._writer is not None:
            self._writer.settle(self._requests, hurry=self._stopping)
            self._writer.close()
        self._writer = Writer(planned.sizes[self._rank])
        taken = snapshot.Snapshot(
            planned, collections, self._writer.buffer, self._extents, self._rank, self._agreement.group
        )
        self._snapshot = (keys, planned, taken)
        return planned, taken

    def _begin(self, step: int, needed_bytes: int) -> tuple[Path | None, list[str]]:
        """Agree on the temporary directory, which the main process makes and gives its extra files; None: it failed."""
        directory = self._run.checkpoints
        begun: dict[str, Any] = {}
        if self._main:
            temporary = directory / commit.temporary_name(step, commit.new_nonce())
            try:
                self._run.restore_directory()
                (temporary / "optimizer" if self._config.save_state else temporary).mkdir(parents=True)
                failpoints.hit("after_mkdir")
                self._write_extras(temporary)
                extras = sorted(p.relative_to(temporary).as_posix() for p in temporary.rglob("*") if p.is_file())
                begun = {"temporary": temporary, "extras": extras}
            except Exception as error:  # the recipe's own code: whatever it raises, the others must hear of it
                shutil.rmtree(temporary, ignore_errors=True)
                begun = {"error": commit.describe_write_error(error, directory, needed_bytes)}
        begun = next(b for b in self._agreement.gather(begun) if b)
        if "error" in begun:
            self._lose(step, f"rank 0: {begun['error']}")
            return None, []
        return begun["temporary"], begun["extras"] if self._main else []

    def _texts(self, step: int, planned: snapshot.Plan) -> dict[str, str]:
        """The small JSON files, as text."""
        random_states = self._agreement.gather(contents.random_state())
        texts = contents.indices(planned)
        if self._config.save_state:
            texts["optimizer/index.json"] = contents.state_index(planned, step)
            texts["trainer_state.json"] = {"step": step, "random_state": random_states}
        return {name: commit.to_json(value) for name, value in texts.items()}

    def _manifest(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        experiment = dict(self._run.saved["experiment"])
        return {
            "accel_train": __version__,
            "run_id": self._run.run_id,
            "step": step,
            "samples_seen": step * int(experiment.get("global_batch_size", 0)),
            "epoch": self._epoch(step),
            "state": self._config.save_state,
            "world_size": self._accelerator.num_processes,
            "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "layout": layout_of(self._accelerator),
            "experiment": experiment,
            "resolved": dict(self._run.saved.get("resolved", {})),
            "metrics": contents.finite_metrics(metrics),
        }

    # ------------------------------------------------------------------------------------------------------- finishing
    def _take_answer(self, *, wait: bool) -> None:
        """Give the writer its job, or take its answer, if there is one, and note it for the other ranks."""
        pending = self._pending
        if pending is None or self._writer is None or self._snapshot is None:
            return
        if pending.phase is Phase.COPYING:
            if not self._snapshot[2].ready(wait=wait):
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
        """Enter the next phase, once every rank's writer has answered. Every rank."""
        pending = self._pending
        assert pending is not None
        self._take_answer(wait=True)
        answers = self._agreement.gather(pending.answer)
        errors = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if a and "error" in a]
        if errors:
            self._give_up("; ".join(errors))
        elif pending.phase is Phase.COMMITTING:
            self._acknowledge()
        else:
            self._commit(pending, {k: v for a in answers for k, v in a["files"].items()})

    def _commit(self, pending: PendingSave, files: Mapping[str, Any]) -> None:
        """Have the main process's writer commit and let old checkpoints go."""
        pending.manifest["seconds"] = round(time.monotonic() - pending.began, 3)
        pending.manifest["files"] = dict(sorted(files.items()))
        pending.phase = Phase.COMMITTING
        pending.answer = None
        if self._main:
            assert self._writer is not None
            self._writer.submit(
                {
                    "do": "commit",
                    "temporary": str(pending.temporary),
                    "final": str(self._run.checkpoints / checkpoint_name(pending.step)),
                    "manifest": pending.manifest,
                    "keep": asdict(self._config),
                    "queue": str(self._run.directory / "hub" / "queue"),
                    "needed_bytes": pending.needed_bytes,
                }
            )

    def _acknowledge(self) -> None:
        pending = self._pending
        assert pending is not None
        self._pending = self._lost = None
        if self._main:
            saved = Checkpoint(self._run.checkpoints / checkpoint_name(pending.step), pending.step, pending.manifest)
            logger.info("saved %s in %.1f s", saved.path, pending.manifest["seconds"])
            self._on_commit(saved)
            self._unoffered = saved

    def _offer(self) -> None:
        """Offer the last commit to the Hub: a step later, when the metrics of its evaluation are in it."""
        if self._unoffered is not None:
            self._pusher.offer(self._unoffered)
            self._unoffered = None

    def _release(self) -> None:
        """End the writer and give its memory back."""
        if self._writer is not None:
            self._writer.settle(self._requests, hurry=self._stopping)
            self._writer.close(kill=self._writer.broken)
        self._writer = self._snapshot = None

    def _give_up(self, reason: str) -> None:
        """A save has failed, on every rank: leave nothing of it."""
        pending = self._pending
        assert pending is not None
        self._pending = None
        if self._saved_step == pending.step:
            self._saved_step = -1
        if self._writer is not None and self._writer.broken:
            self._release()
        if self._main and not (pending.answer or {}).get("complete"):
            shutil.rmtree(pending.temporary, ignore_errors=True)
        self._lose(pending.step, reason)

    def _lose(self, step: int, reason: str) -> None:
        """On every rank: stop, or warn and remember it, in case it was the last."""
        if self._config.on_error == "stop":
            raise CheckpointWriteError(reason)
        self._lost = reason
        logger.warning("checkpoint of step %d was not saved; training goes on: %s", step, reason)
