"""Evaluations of a run: held-out means, and a start that evaluates without training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config import UsageError
from accel_train.data.datasets import MapDataset
from accel_train.metrics import evaluation
from accel_train.metrics.logs import info
from accel_train.metrics.recorder import log_evaluation, write_report
from accel_train.options.allowed import is_covered
from accel_train.runtime.main_alone import on_main
from accel_train.store.names import DATA_FINGERPRINT
from accel_train.wording import did_you_mean, nearest, shortened

if TYPE_CHECKING:
    from accel_train.train_state import Experiment, TrainState

logger = logging.getLogger(__name__)
TAKES = "training.evaluate takes a function that returns a dict of numbers"


def returned_by(evaluate: object) -> Any:
    """Call an evaluation and return its result. Raises ``UsageError`` if it is not callable."""
    if not callable(evaluate):
        raise UsageError(f"{TAKES}; it was given {_described(evaluate)}: pass the function itself, without calling it")
    return evaluate()


def numbers(accelerator: Accelerator, returned: object, *before: Callable[[], None]) -> dict[str, float]:
    """Return the metrics of an evaluation as plain numbers: tensors and arrays of one element become that element.

    Collective. Only the main process's value is checked, since a recipe may return metrics only there. Raises
    ``UsageError`` on every process unless it is a dict of numbers, after calling each of ``before``.
    """
    try:
        on_main(accelerator, lambda: _refuse_others(returned), training=True)
    except UsageError:
        for act in before:
            act()
        raise
    # On other processes the evaluation may have returned nothing.
    if not isinstance(returned, Mapping):
        return {}
    return {name: _plain(value) for name, value in returned.items()}


def warn_undeclared(declared: Sequence[str] | None, metrics: Mapping[str, float]) -> None:
    """Warn of metrics that the recipe has not declared, if a declared one is missing: its name may be misspelt."""
    missing = [name for name in declared or () if name not in metrics]
    others = [name for name in metrics if name not in (declared or ())]
    if missing and others:
        logger.warning(
            "the evaluation returned %s, which open_experiment(metrics=...) does not declare, and not %s, which "
            "it does%s; give both the same names: checkpoints.best_metric takes a declared one",
            shortened(others, 3),
            shortened(missing, 3),
            did_you_mean(nearest(others[0], missing)),
        )


def _refuse_others(returned: object) -> None:
    if not isinstance(returned, Mapping):
        raise UsageError(f"{TAKES}; it returned {_described(returned)}: return one, as in {{'heldout_loss': 0.5}}")
    for name, value in returned.items():
        if not isinstance(name, str) or not isinstance(_plain(value), (int, float)):
            raise UsageError(
                f"{TAKES}; it returned {_described(value)} for {name!r}: give one number for each metric, under a name "
                "of its own"
            )


def _plain(value: Any) -> Any:
    """Return the element of a one-element tensor or array as a Python number, and anything else unchanged."""
    is_tensor = isinstance(value, Tensor) and value.numel() == 1
    is_array = isinstance(value, (np.generic, np.ndarray)) and value.size == 1
    return value.item() if is_tensor or is_array else value


def _described(value: object) -> str:
    """Describe a value by its type for a message, with the shape of a tensor."""
    shape = getattr(value, "shape", None)
    if value is None:
        return "None"
    if shape is None:
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} of shape {tuple(shape)}"


def heldout_means(
    prepared: TrainState,
    dataset: MapDataset,
    batch_size: int,
    metrics_of: Callable[[nn.Module, dict[str, Tensor]], Mapping[str, Tensor]],
) -> dict[str, float]:
    """Return the mean of each metric over a held-out set, with the EMA weights, the same on any number of processes.

    ``metrics_of(model, batch)`` returns the metrics of each sample, (B,). Their names get the prefix ``heldout_``.
    Collective: every process calls it. A stop ends it between two batches. Raises ``UsageError`` for metrics of another
    shape. A sample's metric must depend on that sample only: with negatives from the batch (CLIP, InfoNCE), the mean
    would depend on ``batch_size``.
    """

    def sums_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = batch["weight"]
        metrics = dict(metrics_of(prepared.model, batch))
        evaluation.require_samples(metrics, weight)
        metrics[evaluation.SAMPLES] = torch.ones_like(weight)
        return {name: (values * weight).sum() for name, values in metrics.items()}

    with evaluation.evaluating(prepared.model, prepared.ema):
        batches = evaluation.heldout_batches(prepared.accelerator, dataset, len(dataset), batch_size)
        sums = evaluation.weighted_sums(prepared.accelerator, batches, sums_of)
    samples = sums.pop(evaluation.SAMPLES)  # may be fewer than the rows read: repeated ones have weight 0
    return {f"heldout_{name}": float(total / samples) for name, total in sums.items()}


def evaluate_only(opened: Experiment, evaluate: Callable[[], Mapping[str, float]]) -> int:
    """Evaluate the restored checkpoint and write the report, without training. Collective. Returns exit code 0.

    An evaluation that a stop had interrupted is recorded as part of the run, and its metrics are added to the
    checkpoint. With ``evaluate_only`` on data that differ from the checkpoint's, the run's own report is kept, and the
    new report names its data. Raises ``UsageError`` if ``checkpoints.best_metric`` is not among the metrics.
    """
    step = opened.start_step
    if opened.config.evaluate_only:
        metrics = numbers(opened.accelerator, returned_by(evaluate))
        write_report(opened.accelerator, opened.report_directory, step, metrics, _other_data(opened))
        log_evaluation(step, metrics, own_summary=opened.config.recipe.labels.own_summary)
    else:
        info(logger, f"a stop interrupted the evaluation after the last step, {step}: running it now")
        metrics = _record_owed(opened, evaluate)
    info(logger, f"written: {opened.report_directory}")
    opened.refuse_unreported(step, metrics)
    return 0


def _other_data(opened: Experiment) -> dict[str, Any]:
    """Return the data fingerprint of an evaluation and the changed options, if its data are not the checkpoint's."""
    run = opened.run
    if run.checkpoint is None or opened.report_directory == run.report_directory():
        return {}
    before: Mapping[str, Any] = run.checkpoint.manifest.get("experiment") or {}
    free = opened.config.run_options().free_to_change
    changed = {
        name: value
        for name, value in run.saved["experiment"].items()
        if value != before.get(name) and not is_covered(name, free)
    }
    # With `data.changed`, the fingerprint in the saved experiment is that of the data the run began with.
    return changed | {DATA_FINGERPRINT: opened.history.contents}


def _record_owed(opened: Experiment, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    """Evaluate, record it as a separate start, and add it to the checkpoint. Collective. Returns the metrics."""
    # Imported here, because few starts have an evaluation to make up for.
    from accel_train.reporting.reports import build_log

    with build_log(opened, {"run_id": opened.run.run_id}) as log:
        metrics = numbers(opened.accelerator, returned_by(evaluate))
        log.evaluation(opened.start_step, metrics)
    opened.accelerator.end_training()
    if opened.accelerator.is_main_process:
        opened.run.add_owed_evaluation(metrics, opened.config.checkpoints, opened.config.hub)
    return metrics
