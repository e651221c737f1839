"""The picture: what is drawn, from whatever a run left behind."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accel_train.metrics.curves import plot_curves
from accel_train.metrics.panels import panels_of, smoothed
from accel_train.metrics.records import last_pass, read_metrics


def train(step: int, **more: object) -> dict[str, object]:
    line: dict[str, object] = {"event": "train", "step": step, "loss": 4.0 - step / 1000, "lr": 1e-3, "grad_norm": 1.0}
    line |= {"samples_per_second": 400.0, "tokens_per_second": 8e3, "step_seconds": 0.2, "data_wait_fraction": 0.25}
    line |= {"forward_fraction": 0.2}
    return line | {"memory_peak_gib": 3.0, "loss_text": 3.0, "loss_latent": 0.5, "mode": "l2t"} | more


LABELS = {"loss_of": "mode", "units": {"nll": "nats per token"}, "titles": {"nll": "NLL"}}
ENVIRONMENT: dict[str, object] = {"event": "environment", "labels": LABELS}


def evaluation(step: int) -> dict[str, object]:
    values = {"l2t_nll": 3.0, "l2t_nll_shuffled": 4.0, "t2l_cosine": 0.9, "samples": 500, "eval_seconds": 3.0}
    return {"event": "evaluation", "step": step, **values}


def write(path: Path, records: list[dict[str, object]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return path


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


def test_losses_by_time_are_no_terms() -> None:
    """Not even of a term named loss."""
    fields = {"loss_at_0.00": 4.0, "loss_at_0.75": 2.0, "latent_at_0.25": 1.0}
    panels = {
        panel.title: set(panel.lines) for panel in panels_of([ENVIRONMENT, train(10, **fields), train(20, **fields)])
    }
    assert panels["Loss terms"] == {"text", "latent"}
    assert panels["Loss by time"] == {"loss at 0.00", "loss at 0.75", "latent at 0.25"}


def test_reading_leaves_out_what_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "train", "step": 1, "loss": "NaN"}\n{"ev\n\n[1]\n{"step": 2}\n{"event": "tr\xff')
    first, second = read_metrics(path)
    assert math.isnan(first["loss"])
    assert second == {"step": 2}


def test_every_value_has_its_panel() -> None:
    lines = [train(10), evaluation(10), train(20, loss_text=2.0, loss_latent=math.nan), evaluation(20)]
    panels = panels_of([ENVIRONMENT, *lines, train(30)])
    drawn = {p.title: {label: (s.steps, s.values) for label, s in p.drawn().items()} for p in panels}
    all_three, both = [10, 20, 30], [10, 20]
    assert drawn.pop("Throughput") == {"samples/s (median 400; 8k tokens/s)": (all_three, [400.0] * 3)}
    step_time = drawn.pop("Step time")
    assert step_time["whole step"] == (all_three, pytest.approx([200.0] * 3))
    assert step_time["forward"] == (all_three, pytest.approx([40.0] * 3))
    assert "backward" not in step_time  # which some devices do not time
    assert step_time["data wait"] == (all_three, pytest.approx([50.0] * 3))
    assert drawn == {
        "Loss": {"training loss": (all_three, [3.99, 3.98, 3.97])},
        "Loss terms": {"text": (all_three, [3.0, 2.0, 3.0]), "latent": ([10, 30], [0.5, 0.5])},
        "Evaluation: NLL": {"l2t nll": (both, [3.0, 3.0]), "l2t nll shuffled": (both, [4.0, 4.0])},
        "Evaluation: cosine": {"t2l cosine": (both, [0.9, 0.9])},
        "Gradient norm": {"grad_norm": (all_three, [1.0] * 3)},
        "Learning rate": {"lr": (all_three, [1e-3] * 3)},
        "Memory": {"memory peak": (all_three, [3.0] * 3)},
    }
    assert [p.title for p in panels][:4] == ["Loss", "Loss terms", "Evaluation: NLL", "Evaluation: cosine"]


def test_losses_of_different_modes_are_lines_of_their_own() -> None:
    modes = ("l2t", "t2l", "l2t", "unconditional", "t2l")
    records = [ENVIRONMENT, *(train(step, mode=mode) for step, mode in enumerate(modes, 1))]
    panels = {panel.title: panel.drawn() for panel in panels_of(records)}
    for title in ("Loss", "Gradient norm"):
        assert {label: line.steps for label, line in panels[title].items()} == {"l2t": [1, 3], "t2l": [2, 5]}


def test_terms_of_different_kinds_are_lines_of_their_own() -> None:
    kinds = ("l2t", "t2l", "l2t", "t2l")
    records = [ENVIRONMENT, *(train(step, mode=kind) for step, kind in enumerate(kinds, 1))]
    for record in records[2::2]:
        del record["loss_latent"]
    panels = {panel.title: panel.drawn() for panel in panels_of(records)}
    terms = {label: line.steps for label, line in panels["Loss terms"].items()}
    assert terms == {"text (l2t)": [1, 3], "text (t2l)": [2, 4], "latent": [1, 3]}


def test_a_single_term_is_not_drawn_again() -> None:
    records = [{"event": "train", "step": step, "loss": 1.0, "loss_loss": 1.0} for step in (1, 2)]
    assert [panel.title for panel in panels_of(records)] == ["Loss"]


def test_numbered_metrics_share_a_panel() -> None:
    labels = {"units": {"band": "mean squared error"}, "titles": {"band": "loss by time"}}
    values = {f"loss_band_{band}": 1.0 for band in (1, 2)}
    records = [{"event": "evaluation", "step": step, **values} for step in (1, 2)]
    (panel,) = panels_of([{"event": "environment", "labels": labels}, *records])
    assert (panel.title, panel.unit) == ("Evaluation: loss by time", "mean squared error")
    assert set(panel.lines) == {"loss band 1", "loss band 2"}


def boxes_of(records: list[dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Where a picture has the titles, the axes with all around them, and the legends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures: list[Any] = []
    real = Figure.savefig

    def savefig(figure: Any, *arguments: Any, **named: Any) -> None:
        real(figure, *arguments, **named)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    plot_curves(write(tmp_path / "m.jsonl", records), tmp_path / "c.png")
    (figure,) = figures
    renderer = FigureCanvasAgg(figure).get_renderer()
    axes = [axis for axis in figure.axes if axis.axison]
    return {
        "title": [figure._suptitle.get_window_extent(renderer)],
        "panels": [axis.get_tightbbox(renderer, bbox_extra_artists=[axis.title]) for axis in axes],
        "curves": [axis.get_window_extent(renderer) for axis in axes],
        "legends": [axis.get_legend().get_window_extent(renderer) for axis in axes if axis.get_legend()],
        "figure": [figure.bbox],
    }


def test_a_high_picture_has_its_title_above_the_panels_and_long_legends_beside_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"v{number}_score": 1.0 + number for number in range(10)}
    single = {f"x_metric{number}": 1.0 for number in range(8)}
    lines = [{"event": "evaluation", "step": step, **many, **single} for step in (10, 20)]
    boxes = boxes_of([ENVIRONMENT, train(10), train(20), *lines], tmp_path, monkeypatch)
    assert len(boxes["curves"]) > 12  # five rows
    (title,) = boxes["title"]
    for panel in boxes["panels"]:
        assert not title.overlaps(panel)
    long = max(boxes["legends"], key=lambda box: box.height)
    for panel in boxes["curves"]:
        assert not long.overlaps(panel)
    (whole,) = boxes["figure"]
    assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 for box in boxes["legends"])


def test_a_single_point_is_no_curve() -> None:
    """One evaluation is told in words; one training line has no picture."""
    (panel,) = panels_of([ENVIRONMENT, train(20), evaluation(20)])
    assert panel.title == "Evaluation at step 20"
    assert panel.text.splitlines() == ["l2t nll: 3", "l2t nll shuffled: 4", "t2l cosine: 0.9"]


def test_steps_done_again_are_drawn_once_as_last_done() -> None:
    lines = [train(s, loss=1.0) for s in (10, 20, 30)] + [{"event": "resume", "step": 10}]
    lines += [train(s, loss=2.0) for s in (20, 30, 40)]
    assert [(line["step"], line["loss"]) for line in last_pass(lines, "train")] == [
        (10, 1.0),
        (20, 2.0),
        (30, 2.0),
        (40, 2.0),
    ]


def test_smoothing_keeps_constants_and_starts_at_the_first_value() -> None:
    assert smoothed([2.5] * 300) == pytest.approx([2.5] * 300)
    line = [float(i) for i in range(1000)]
    curve = smoothed(line)  # window of 20 steps: decay 0.95, lag 19 on a straight line
    assert curve[0] == 0.0
    assert curve[-1] == pytest.approx(line[-1] - 0.95 / 0.05, abs=1e-6)


RUNS = {
    "nothing": [],
    "environment only": [{"event": "environment", "strategy": "ddp", "world_size": 2}],
    "one line": [train(1)],
    "one evaluation": [evaluation(5)],
    "keys missing": [
        {"event": "train", "step": 3, "loss": 1.0},
        {"event": "train", "step": 4, "lr": 0.0},
        {"event": "train"},
    ],
    "not finite": [train(10), train(20, loss="NaN", grad_norm="Infinity"), train(30)],
    "long and resumed": [train(s, loss=50.0 / s) for s in range(1, 600)]
    + [{"event": "resume", "step": 300}, evaluation(500)],
}


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("name", list(RUNS))
def test_any_run_gives_a_picture(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "metrics.jsonl", RUNS[name], tail='{"event": "tra')
    target = plot_curves(source, tmp_path / "curves.png")
    picture = pixels(target)
    assert picture.shape[0] > 300
    assert picture.shape[1] > 600
    assert picture.std() > 1  # not blank
    assert sorted(os.listdir(tmp_path)) == ["curves.png", "metrics.jsonl"]


def test_marks_of_resumes_and_of_losses_that_are_not_finite(tmp_path: Path) -> None:
    def red_and_grey(records: list[dict[str, object]]) -> tuple[int, int]:
        picture = pixels(plot_curves(write(tmp_path / "m.jsonl", records), tmp_path / "c.png")).astype(int)
        high, green, blue = (picture[..., channel] for channel in range(3))
        red = ((high - green > 60) & (abs(green - blue) < 20)).sum()
        neutral = picture.max(-1) - picture.min(-1) < 4
        grey = (neutral & (abs(picture[..., 0] - 150) < 40)).sum()
        return int(red), int(grey)

    plain = [train(10), train(20), train(30)]
    red, grey = red_and_grey(plain)
    broken_red, _ = red_and_grey([train(10), train(20, loss="NaN"), train(30)])
    _, resumed_grey = red_and_grey([*plain[:2], {"event": "resume", "step": 20}, plain[2]])
    assert red == 0
    assert broken_red > 100
    assert resumed_grey > grey + 100
