"""Pictures and texts of evaluations in the trackers: in TensorBoard's own files, and as the calls of other packages."""

from __future__ import annotations

import io
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator, tracking
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class
from PIL import Image

from accel_train.metrics.progress import LogConfig
from accel_train.metrics.recorder import Recorder
from accel_train.metrics.tracking import sending
from accel_train.metrics.tracking.report_files import ReportFile, ReportFiles
from accel_train.metrics.tracking.sending import send
from tests import compiling
from tests.domains.images.drawn import beyond_pillow
from tests.metrics.test_records import FIELDS

PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def write(report: Path, name: str, shift: int = 0) -> None:
    report.mkdir(exist_ok=True)
    Image.fromarray(PIXELS + np.uint8(shift)).save(report / name)


def recorder(accelerator: Accelerator, folder: Path, *names: str) -> Recorder:
    options = LogConfig(log_every=1, trackers=names, project="p", progress_bar="off")
    return Recorder(accelerator, folder, options, max_steps=100)


def test_tensorboard_has_the_files_of_each_evaluation(accelerator: Accelerator, tmp_path: Path) -> None:
    compiling.skip_without("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = tmp_path / "report"
    write(report, "old.png")  # an earlier start has sent it
    with recorder(accelerator, tmp_path, "tensorboard") as log:
        for step in (1, 2, 3):
            log.train(step, FIELDS)
            if step != 2:
                write(report, "drawn.png", step)
            (report / "words.md").write_text(f"# Step {step}\n\na *word*\n")
            (report / "profile.md").write_text(f"of the profiler {step}")
            write(report, "curves.png", step)
            (report / "words").mkdir(exist_ok=True)
            (report / "words" / f"step_{step}.md").write_text("a copy")
            log.evaluation(step, {"score": 3.0})
    events = EventAccumulator(str(tmp_path / "trackers" / "p"), {"images": 0, "tensors": 0}).Reload()
    assert events.Tags()["images"] == ["report/drawn"]
    drawn = events.Images("report/drawn")
    assert [(image.step, image.width, image.height) for image in drawn] == [(1, 7, 5), (3, 7, 5)]
    for image in drawn:
        decoded = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
        np.testing.assert_array_equal(decoded, PIXELS + np.uint8(image.step))
    texts = [tag for tag in events.Tags()["tensors"] if tag.startswith("report/")]
    assert texts == ["report/words/text_summary"]
    shown = [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(texts[0])]
    assert shown == [(step, f"# Step {step}\n\na *word*\n") for step in (1, 2, 3)]


def test_a_file_that_cannot_be_read_costs_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = ReportFiles(tmp_path / "report")
    write(tmp_path / "report", "whole.png")
    (tmp_path / "report" / "torn.png").write_bytes(b"\x89PNG")
    (tmp_path / "report" / "large.png").write_bytes(beyond_pillow())
    (tmp_path / "report" / "broken.md").write_bytes(b"\xff\xfe")
    assert [file.name for file in files.take_written()] == ["report/whole"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert len(caplog.records) == 3
    assert files.take_written() == []
    assert ReportFiles(tmp_path / "nothing").take_written() == []


class Broken(GeneralTracker):
    """Its server takes numbers and no pictures."""

    name = "pictureless"
    requires_logging_directory = False
    numbers: list[int]
    pictures: list[int]
    good: tuple[int, ...] = ()

    def __init__(self, run_name: str) -> None:
        super().__init__()
        type(self).numbers, type(self).pictures = [], []

    @property
    def tracker(self) -> None:
        return None

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: object) -> None:
        self.numbers.append(step or 0)

    def log_images(self, values: dict[str, Any], step: int, **kwargs: object) -> None:
        self.pictures.append(step)
        if step not in self.good:
            raise ConnectionError("413 too large")


@pytest.fixture
def broken() -> Iterator[type[Broken]]:
    register_tracker_class(Broken)
    yield Broken
    LOGGER_TYPE_TO_CLASS.pop("pictureless")
    Broken.good = ()


@pytest.mark.parametrize(("good", "tried"), [((), [1, 2, 3]), ((2, 4), [1, 2, 3, 4, 5, 6])])
def test_a_tracker_that_fails_with_pictures_goes_on_with_numbers(
    accelerator: Accelerator,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    broken: type[Broken],
    good: tuple[int, ...],
    tried: list[int],
) -> None:
    compiling.skip_without("tensorboard")
    broken.good = good
    with recorder(accelerator, tmp_path, "pictureless", "tensorboard") as log:
        for step in range(1, 7):
            log.train(step, FIELDS)
            write(tmp_path / "report", "drawn.png", step)
            log.evaluation(step, {"score": 3.0})
    assert broken.pictures == tried
    assert broken.numbers == [step for step in range(1, 7) for _ in range(2)]
    warnings = [record.getMessage() for record in caplog.records if "pictureless" in record.getMessage()]
    assert len(warnings) == (0 if good else 1)
    for text in warnings:
        assert "3 times in a row and no longer gets pictures and texts (ConnectionError: 413 too large)" in text


# The calls of other packages, through Accelerate's own trackers


class Calls:
    """Stands for an object of a package and keeps the calls of the methods that it is given."""

    def __init__(self, *methods: str) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        for method in methods:
            setattr(self, method, lambda *a, _method=method, **k: self.made.append((_method, a, k)))


def package(monkeypatch: pytest.MonkeyPatch, name: str, *kinds: str) -> None:
    """Install a package whose classes are tuples of their name and arguments."""
    made = types.ModuleType(name)
    for kind in kinds:
        setattr(made, kind, lambda *a, _kind=kind, **k: (_kind, *a, *k.values()))
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def files(tmp_path: Path, accelerator: Accelerator) -> tuple[ReportFile, ReportFile]:
    watched = ReportFiles(tmp_path)
    write(tmp_path, "drawn.png")
    (tmp_path / "words.md").write_text("a word")
    drawn, words = watched.take_written()
    return drawn, words


def send_both(tracker: GeneralTracker, files: tuple[ReportFile, ReportFile]) -> None:
    assert [send(tracker, file, 20) for file in files] == [True, True]


@pytest.mark.parametrize(
    ("name", "kinds", "text"),
    [
        ("wandb", ("Image", "Table"), ("Table", ["text"], [["a word"]], None)),
        ("swanlab", ("Image", "Text"), ("Text", "a word")),
    ],
)
def test_trackers_that_take_a_list_of_pictures(
    monkeypatch: pytest.MonkeyPatch,
    files: tuple[ReportFile, ReportFile],
    name: str,
    kinds: tuple[str, ...],
    text: tuple[object, ...],
) -> None:
    package(monkeypatch, name, *kinds)
    tracker = LOGGER_TYPE_TO_CLASS[name]("p")
    tracker.run = run = Calls("log")
    send_both(tracker, files)
    assert run.made == [
        ("log", ({"report/drawn": [("Image", files[0].image)]},), {"step": 20}),
        ("log", ({"report/words": text},), {"step": 20}),
    ]


def test_trackio(monkeypatch: pytest.MonkeyPatch, files: tuple[ReportFile, ReportFile]) -> None:
    package(monkeypatch, "trackio", "Image", "Markdown")
    tracker = tracking.TrackioTracker("p")
    tracker.run = run = Calls("log")
    send_both(tracker, files)
    assert run.made == [
        ("log", ({"report/drawn": ("Image", files[0].image)},), {"step": 20}),
        ("log", ({"report/words": ("Markdown", "a word")},), {"step": 20}),
    ]


def test_aim(monkeypatch: pytest.MonkeyPatch, files: tuple[ReportFile, ReportFile]) -> None:
    package(monkeypatch, "aim", "Image", "Text")
    tracker = tracking.AimTracker("p")
    tracker.writer = run = Calls("track")
    send_both(tracker, files)
    assert run.made == [
        ("track", (("Image", files[0].image, ""),), {"name": "report/drawn", "step": 20}),
        ("track", (("Text", "a word"),), {"name": "report/words", "step": 20}),
    ]


def test_clearml(files: tuple[ReportFile, ReportFile]) -> None:
    logger = Calls("report_image", "report_table")
    tracker = tracking.ClearMLTracker("p")
    tracker.task = types.SimpleNamespace(get_logger=lambda: logger)
    send_both(tracker, files)
    (_, _, image), (_, _, table) = logger.made
    # report_image takes one picture, and not a list.
    assert image == {"title": "report/drawn", "series": "train", "iteration": 20, "image": files[0].image}
    assert (table["table_plot"], table["iteration"]) == ([["text"], ["a word"]], 20)


def test_comet(files: tuple[ReportFile, ReportFile]) -> None:
    tracker = tracking.CometMLTracker("p")
    tracker.writer = experiment = Calls("log_image", "log_text")
    send_both(tracker, files)
    assert experiment.made == [
        ("log_image", (str(files[0].path),), {"name": "report/drawn", "step": 20}),
        ("log_text", ("a word",), {"step": 20, "metadata": {"name": "report/words"}}),
    ]


def test_mlflow(monkeypatch: pytest.MonkeyPatch, files: tuple[ReportFile, ReportFile]) -> None:
    mlflow: Any = types.ModuleType("mlflow")
    calls = Calls("log_artifact")
    mlflow.log_artifact = calls.log_artifact  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    send_both(tracking.MLflowTracker.__new__(tracking.MLflowTracker), files)
    folder = "report/step_00000020"
    assert [made[2] for made in calls.made] == [
        {"local_path": str(file.path), "artifact_path": folder} for file in files
    ]


def test_dvclive_takes_pictures_and_says_once_that_it_takes_no_texts(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = Calls("log_image", "log_metric", "next_step", "log_params", "end")
    (tmp_path / "report").mkdir()
    with recorder(accelerator, tmp_path, "tensorboard") as log:
        accelerator.trackers.append(tracking.DVCLiveTracker("p", live=live))
        log._trackers.log = lambda *_: None  # type: ignore[method-assign]
        with caplog.at_level(logging.INFO, "accel_train.metrics.tracking.trackers"):
            for step in (1, 2):
                write(tmp_path / "report", "drawn.png", step)
                (tmp_path / "report" / "words.md").write_text(f"{step}")
                log.evaluation(step, {"score": 1.0})
    pictures = [arguments for method, arguments, _ in live.made if method == "log_image"]
    path = str(tmp_path / "report" / "drawn.png")
    assert pictures == [("report/drawn/1.png", path), ("report/drawn/2.png", path)]
    told = [record.getMessage() for record in caplog.records if "dvclive" in record.getMessage()]
    assert told == ["tracker dvclive does not accept texts: the report has them"]


def test_every_tracker_of_accelerate_is_known() -> None:
    assert set(sending.PICTURES) == set(LOGGER_TYPE_TO_CLASS)
    assert set(sending.TEXTS) == set(LOGGER_TYPE_TO_CLASS) - {"dvclive"}
