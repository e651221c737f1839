"""Sending of a picture or a text to each tracker, by Accelerate's ``log_images`` and ``log_table`` or its own calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from accel_train.metrics.tracking.report_files import ReportFile

Send = Callable[[Any, ReportFile, int], None]
"""Send a file to a tracker of Accelerate at a step."""


def send(tracker: Any, file: ReportFile, step: int) -> bool:
    """Send a picture or a text. Return False if the tracker takes none. Raises whatever the tracker raises."""
    is_text = file.image is None
    table = TEXTS if is_text else PICTURES
    call = table.get(tracker.name)
    # A tracker registered by the user may have the methods of Accelerate's own trackers.
    if call is None and is_text and hasattr(tracker, "log_table"):
        call = _table
    if call is None and not is_text and hasattr(tracker, "log_images"):
        call = _pictures
    if call is None:
        return False
    call(tracker, file, step)
    return True


def _pictures(tracker: Any, file: ReportFile, step: int) -> None:
    tracker.log_images({file.name: [file.image]}, step=step)


def _picture(tracker: Any, file: ReportFile, step: int) -> None:
    """Send to a tracker whose ``log_images`` passes its value on as one picture, despite its docstring."""
    tracker.log_images({file.name: file.image}, step=step)


def _array(tracker: Any, file: ReportFile, step: int) -> None:
    import numpy

    # A batch of one picture, (1, H, W, 3).
    batch = numpy.asarray(file.image)[None]
    tracker.log_images({file.name: batch}, step=step, dataformats="NHWC")


def _text(tracker: Any, file: ReportFile, step: int) -> None:
    tracker.log({file.name: file.text}, step=step)


def _table(tracker: Any, file: ReportFile, step: int) -> None:
    tracker.log_table(file.name, columns=["text"], data=[[file.text]], step=step)


def _wrapped(package: str, kind: str) -> Send:
    """Return a function that logs the picture or the text as an object of the tracker's own package."""

    def call(tracker: Any, file: ReportFile, step: int) -> None:
        value = file.text if file.image is None else file.image
        wrapper = getattr(importlib.import_module(package), kind)
        tracker.log({file.name: wrapper(value)}, step=step)

    return call


def _comet_picture(tracker: Any, file: ReportFile, step: int) -> None:
    tracker.tracker.log_image(str(file.path), name=file.name, step=step)


def _comet_text(tracker: Any, file: ReportFile, step: int) -> None:
    tracker.tracker.log_text(file.text, step=step, metadata={"name": file.name})


def _mlflow_artifact(tracker: Any, file: ReportFile, step: int) -> None:
    # Artifacts have no step, so each step has a folder.
    tracker.log_artifact(str(file.path), artifact_path=f"report/step_{step:08d}")


def _dvclive_picture(tracker: Any, file: ReportFile, step: int) -> None:
    # A folder of pictures named by step is what DVC shows with a slider.
    tracker.tracker.log_image(f"{file.name}/{step}.png", str(file.path))


PICTURES: Mapping[str, Send] = {
    "tensorboard": _array,
    "wandb": _pictures,
    "swanlab": _pictures,
    "aim": _picture,
    "clearml": _picture,
    "trackio": _wrapped("trackio", "Image"),
    "comet_ml": _comet_picture,
    "mlflow": _mlflow_artifact,
    "dvclive": _dvclive_picture,
}
TEXTS: Mapping[str, Send] = {
    "tensorboard": _text,
    "wandb": _table,
    "clearml": _table,
    "swanlab": _wrapped("swanlab", "Text"),
    "aim": _wrapped("aim", "Text"),
    "trackio": _wrapped("trackio", "Markdown"),
    "comet_ml": _comet_text,
    "mlflow": _mlflow_artifact,
}
"""DVCLive is missing, because it does not take texts."""
