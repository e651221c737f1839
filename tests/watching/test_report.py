"""``accel-train report``: the structure of the page, its numbers beside those of the log, and the page in Chromium."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from accel_train import cli
from accel_train.config import UsageError
from accel_train.metrics.recorder import quoted, write_page_of_step
from accel_train.watching.html_report import drawing
from accel_train.watching.html_report.charts import BUCKETS, kept_points
from accel_train.watching.html_report.drawing import linear_ticks, short
from accel_train.watching.html_report.facts import resume_command
from accel_train.watching.html_report.samples import markdown_html
from tests.waiting import PATIENCE_SECONDS
from tests.watching.run_directory import RunDirectory

VOID = {"meta", "input", "img", "wbr"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\" ' &amp;"
LABELS = {"loss_of": "mode", "units": {"nll": "nats per token"}, "titles": {"nll": "NLL"}}
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Page(HTMLParser):
    """Elements with their attributes, the text of each, and proof that all are closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.source = path.read_text()
        self.feed(self.source)
        self.close()
        assert not self._open, [self.elements[index][:2] for index in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        opened = self.elements[self._open.pop()][0]
        assert opened == tag, f"<{opened}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        for index in self._open:
            self.elements[index][2].append(data)

    def all(self, tag: str, **attributes: str) -> list[tuple[dict[str, str | None], str]]:
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [(a, "".join(t)) for g, a, t in self.elements if g == tag and wanted.items() <= a.items()]

    def data(self) -> dict[str, Any]:
        ((_, text),) = self.all("script", id="data")
        return json.loads(text)

    def curves(self) -> dict[tuple[str, str], tuple[list[int], list[float]]]:
        return {
            (chart["title"], curve["label"]): (curve["steps"], curve["values"])
            for chart in self.data()["charts"]
            for curve in chart["curves"]
        }

    def facts(self) -> dict[str, str]:
        names = [text for _, text in self.all("dt")]
        return dict(zip(names, (text for _, text in self.all("dd")), strict=True))


def write(output: Path, *runs: RunDirectory) -> Page:
    assert cli._main(["report", *(str(run.path) for run in runs), "--output", str(output)]) == 0
    return Page(output)


def noisy_run(path: Path, seed: int = 0, steps: int = 60) -> RunDirectory:
    """Two modes, evaluations, saves, a kill, a resume, and a loss that is not finite."""
    noise = random.Random(seed)
    run = RunDirectory(path, optimizer={"lr": 1e-3 * (seed + 1)})
    run.add("environment", labels=LABELS, command="recipes/x.py base", world_size=2, strategy="ddp", precision="bf16")
    for step in range(1, steps + 1):
        if step == 31:
            run.add("checkpoint", 30, path="x")
            run.add("environment", labels=LABELS, command="recipes/x.py base", world_size=2, strategy="ddp")
            run.add("resume", 30)
        mode = "l2t" if step % 2 else "t2l"
        loss: Any = "NaN" if step == 11 else 3 + noise.gauss(0, 0.1) + (9 if mode == "t2l" else 0)
        run.train(step, loss=loss, mode=mode, memory_peak_gib=6.5)
        if step % 20 == 0:
            run.add("evaluation", step, l2t_nll=4.0 - step / 50, l2t_nll_shuffled=4.0)
    return run


def lines(run: RunDirectory, event: str) -> list[dict[str, Any]]:
    """Read with nothing of the library; the steps of these runs are written once."""
    records = [json.loads(line) for line in run.file.read_text().splitlines()]
    return [record for record in records if record["event"] == event]


# ------------------------------------------------------------------------------------------------------------- numbers
def test_the_points_of_the_page_are_those_of_the_log(tmp_path: Path) -> None:
    run = noisy_run(tmp_path / "run")
    curves = write(tmp_path / "page.html", run).curves()
    trained = [line for line in lines(run, "train") if line["loss"] != "NaN"]
    for mode in ("l2t", "t2l"):
        of_mode = [line for line in trained if line["mode"] == mode]
        expected = ([line["step"] for line in of_mode], [line["loss"] for line in of_mode])
        assert curves["Loss", mode] == expected
    trained = lines(run, "train")
    steps = [line["step"] for line in trained]
    assert curves["Learning rate", "lr"] == (steps, [line["lr"] for line in trained])
    assert curves["Memory", "memory peak"] == (steps, [6.5] * 60)
    evaluated = lines(run, "evaluation")
    found = curves["Evaluation: NLL", "l2t nll"]
    assert found == ([20, 40, 60], [line["l2t_nll"] for line in evaluated])
    titles = ("Loss", "Evaluation: NLL", "Gradient norm", "Learning rate", "Throughput", "Step time", "Memory")
    assert {title for title, _ in curves} == set(titles)


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path)]


def test_the_drawn_line_has_the_shape_of_the_values(tmp_path: Path) -> None:
    """Differences between drawn points are those of the values, times one factor for each axis."""
    run = noisy_run(tmp_path / "run")
    page = write(tmp_path / "page.html", run)
    titles = [chart["title"] for chart in page.data()["charts"]]
    steps, values = page.curves()["Evaluation: NLL", "l2t nll"]
    figure = page.source.split('<figure class="chart"')[1 + titles.index("Evaluation: NLL")]
    drawn = points(re.findall(r'class="line" d="M([^"]*)"', figure)[0])
    assert len(drawn) == len(steps)
    x = [point[0] for point in drawn]
    y = [point[1] for point in drawn]
    assert (x[1] - x[0]) / (steps[1] - steps[0]) == pytest.approx((408 - 54) / 60, abs=0.01)
    assert (x[0] - 54) / steps[0] == pytest.approx((408 - 54) / 60, abs=0.01)
    assert (y[1] - y[0]) / (values[1] - values[0]) == pytest.approx((y[2] - y[0]) / (values[2] - values[0]), rel=0.01)
    assert y[0] < y[1] < y[2]  # falling values, and y points down


def test_several_runs_share_their_charts(tmp_path: Path) -> None:
    first, second = noisy_run(tmp_path / "first"), noisy_run(tmp_path / "second", 1, steps=50)
    page = write(tmp_path / "page.html", first, second, first)
    curves = page.curves()
    for run, count in ((first, 30), (second, 25)):
        name = run.path.name
        expected = [line["loss"] for line in lines(run, "train") if line["mode"] == "t2l"]
        assert curves["Loss: t2l", name][1] == expected
        assert len(expected) == count
    assert page.data()["last_step"] == 60
    keys = [text.split() for _, text in page.all("label") if text.strip().startswith(("first", "second"))]
    assert keys[0] == ["first", f"{curves['Loss: l2t', 'first'][1][-1]:.4g}"]
    differing = page.source.split("differing ")[1].split("</table>")[0]
    assert "0.001" in differing
    assert "0.002" in differing
    assert "max_" not in differing


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    page = write(tmp_path / "page.html", noisy_run(tmp_path / "a" / "run"), noisy_run(tmp_path / "b" / "run"))
    assert ("Loss: l2t", f"{tmp_path}/a/run") in page.curves()


@pytest.mark.parametrize("count", [1, 2, 599, 600, 601, 1000, 12_345])
def test_thinning_keeps_ends_and_extremes(count: int) -> None:
    noise = random.Random(count)
    values = [noise.gauss(0, 1) for _ in range(count)]
    kept = kept_points(values)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert len(kept) == count or len(kept) <= 2 * BUCKETS + 2
    for bucket in range(BUCKETS) if count > 2 * BUCKETS else ():
        stretch = range(bucket * count // BUCKETS, (bucket + 1) * count // BUCKETS)
        drawn = [values[index] for index in kept if index in stretch]
        assert min(drawn) == min(values[index] for index in stretch)
        assert max(drawn) == max(values[index] for index in stretch)


def test_a_long_run_is_a_small_page_that_says_so(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run", max_steps=20_000)
    losses = [1.0 + step % 3 for step in range(20_001)]
    losses[7_777] = 99.0
    records = [{"event": "train", "step": step, "loss": losses[step], "lr": 0.1} for step in range(1, 20_001)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    with run.file.open("a") as file:
        file.write(text)
    page = write(tmp_path / "page.html", run)
    assert len(page.source) < 150_000
    steps, values = page.curves()["Loss", "training loss"]
    assert (steps[0], steps[-1], values[-1]) == (1, 20_000, 1.0 + 20_000 % 3)
    assert values[steps.index(7_777)] == 99.0
    (note,) = [text for _, text in page.all("p", class_="note")]
    assert f"The longest has 20,000 logged points; {len(steps)} are drawn." in note
    smooth = re.findall(r'class="smooth" d="M([^"]*)"', page.source)
    assert len(points(smooth[0])) == len(steps)


# ---------------------------------------------------------------------------------------------------------------- page
def test_the_head_says_what_ran_and_how_to_go_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.add(
        "environment", command="recipes/x.py base --seed 3", world_size=1, strategy="single", versions={"torch": "2"}
    )
    run.steps(1, 10)
    (run.path / "config.yaml").write_text("seed: 3\n")
    run.add("memory", 1, held_bytes={"weights": 2_000_000_000}, rest_of_peak_bytes=3_000_000_000)
    run.train(11, save_stall_seconds=1.25)
    run.train(12, save_stall_seconds=0.5)
    facts = write(tmp_path / "page.html", run).facts()
    assert facts["Memory, first step"] == "weights 2.0 GB; activations and temporaries 3.0 GB"
    assert facts["Blocked by saving"] == "1.8 s in all, at most 1.2 s between two training lines"
    assert facts["Recipe"] == "recipes/x.py"
    assert facts["Preset or file"] == "base"
    assert facts["To resume"] == f"python recipes/x.py {run.path}/config.yaml --output_dir {run.path}"
    assert facts["State"].startswith("silent, step 12 of 100 (no line for")
    assert facts["Versions"] == "torch 2"
    assert facts["Recorded time"].startswith("0:18 in 2 start(s), 0.01 device hours, since 2023-11-14 22:13 UTC")


def test_device_hours_are_those_of_all_processes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")  # one process, up to 2 s
    run.add("environment", world_size=8)
    run.train(1, after=3597.0)  # 3,600 s since the beginning
    recorded = write(tmp_path / "page.html", run).facts()["Recorded time"]
    assert recorded.startswith("1:00:02 in 2 start(s), 8.00 device hours")


def test_the_command_to_resume_names_what_is_not_recorded(tmp_path: Path) -> None:
    # Without a config.yaml too, or it would start another run in the recipe's own directory.
    assert resume_command(tmp_path, "x.py --seed 3", 1) == f"python x.py --seed 3 --output_dir {tmp_path}"
    assert resume_command(tmp_path, "x.py --seed 3", 8) == (
        f"accel-train launch --config_file LAUNCH_FILE.yaml x.py --seed 3 --output_dir {tmp_path}"
    )
    named = tmp_path / "with space"
    named.mkdir()
    (named / "config.yaml").write_text("")
    command = resume_command(named, "'my x.py' --seed 3", 1)
    assert command == f"python 'my x.py' '{named}/config.yaml' --output_dir '{named}'"


NOTEBOOK = "/site/ipykernel_launcher.py -f /tmp/k.json"


@pytest.mark.parametrize("command", [NOTEBOOK, "/venv/bin/ipython", "-c base", "'' base", "sweep.py 3"])
def test_a_run_that_was_not_begun_by_its_recipe_is_resumed_by_it(tmp_path: Path, command: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.add("environment", recipe="/my recipes/x.py", command=command)
    (run.path / "config.yaml").write_text("")
    facts = write(tmp_path / "page.html", run).facts()
    assert facts["Recipe"] == "/my recipes/x.py"
    assert facts["Called by"] == command
    assert facts["To resume"] == f"python '/my recipes/x.py' {run.path}/config.yaml --output_dir {run.path}"


def test_a_recipe_in_a_cell_of_a_notebook_has_no_command_to_resume(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.add("environment", recipe=None, command=NOTEBOOK)
    (run.path / "config.yaml").write_text("")
    facts = write(tmp_path / "page.html", run).facts()
    assert facts["Called by"] == NOTEBOOK
    assert not {"Recipe", "To resume"} & facts.keys()


@pytest.mark.parametrize("program", ["/venv/bin/my-train", "/site/my_pkg/__main__.py", "my_pkg/train.py"])
def test_a_program_that_passes_its_words_to_the_recipe_resumes_the_run(tmp_path: Path, program: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.add("environment", recipe="/site/my_pkg/train.py", command=f"{program} base --seed 3")
    (run.path / "config.yaml").write_text("")
    facts = write(tmp_path / "page.html", run).facts()
    assert facts["Recipe"] == program
    assert facts["Preset or file"] == "base"
    assert facts["To resume"] == f"python {program} {run.path}/config.yaml --output_dir {run.path}"


def test_events_are_marked_and_listed(tmp_path: Path) -> None:
    run = noisy_run(tmp_path / "run")
    run.add("warning", 60, message="the disk is nearly full")
    run.add("bad_step", 60, reason="spike", skipped=True)
    run.add("out_of_memory", 60, micro_batch_size=8, next_micro_batch_size=4, process=1)
    slow = {"process": 3, "host": "n4", "measure": "host"}
    run.add("straggler", 60, **slow, factor=1.72, recovered=False)
    run.add("replicas_differ", 60, parameters=["a", "b", "c"], processes=[2])
    run.add("end", 60, reason="RuntimeError")
    run.add("environment", strategy="single", world_size=1)
    run.add("out_of_memory", 60, during="save", micro_batch_size=4, process=0)
    run.add("end", 60, reason="OutOfMemoryError")
    run.add("environment", strategy="single", world_size=1)
    run.add("out_of_memory", 60, during="step", micro_batch_size=1, process=0)
    run.add("end", 60, reason="stopped")
    page = write(tmp_path / "page.html", run)
    rows = re.findall(r"<tr><td>(\d+)</td><td>([a-z ]+)</td>", page.source)
    assert rows == [
        *[("0", "start"), ("0", "crash"), ("0", "start"), ("20", "evaluation"), ("30", "save"), ("30", "crash")],
        *[("30", "restart"), ("40", "evaluation"), ("60", "evaluation"), ("60", "warning"), ("60", "bad step")],
        *[("60", "out of memory"), ("60", "slow process"), ("60", "weights differ"), ("0", "start")],
        *[("60", "out of memory"), ("60", "crash"), ("0", "start"), ("60", "out of memory"), ("60", "stop")],
        ("11", "not finite"),
    ]
    chart = page.source.split("<svg")[1].split("</svg>")[0]
    marks = re.findall(r'class="event ([a-z-]+)', chart)
    assert sorted(marks) == sorted(kind.replace(" ", "-") for _, kind in rows if kind != "start")
    assert "warning at step 60: the disk is nearly full" in chart
    assert "bad step at step 60: a spike of the gradient norm, skipped" in chart
    assert "out of memory at step 60: micro-batch of 8; continues with 4" in chart
    assert "out of memory at step 60: in the save, process 0; logs/rank_0.log says what can be done" in chart
    assert "out of memory at step 60: micro-batch of 1, process 0; logs/rank_0.log says what can be done" in chart
    text = "process 3 (n4) is slower than the others (host): 1.7 times as long"
    assert f"slow process at step 60: {text}" in chart
    text = "the weights of processes [2] differed (a, b and 1 more); nothing was saved"
    assert f"weights differ at step 60: {text}" in chart


def test_samples_and_pictures_are_in_the_page(tmp_path: Path) -> None:
    run = noisy_run(tmp_path / "run")
    report = run.path / "report"
    report.mkdir()
    (report / "samples.md").write_text("# Samples\n\n## 1\n\n- held out: > to be\n- sampled: > or <b>not</b>\n\nend\n")
    for name in ("fields.png", "curves.png", ".fields.png.tmp"):
        (report / name).write_bytes(PIXEL)
    page = write(tmp_path / "page.html", run)
    (picture,) = page.all("img")
    assert picture[0]["alt"] == "fields.png"
    assert picture[0]["src"] == "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    assert [text for _, text in page.all("q")] == ["to be", "or <b>not</b>"]
    assert [text for _, text in page.all("h4")] == ["Samples", "1"]


def test_samples_of_earlier_evaluations_are_folded_away(tmp_path: Path) -> None:
    run = noisy_run(tmp_path / "run")
    folder = run.path / "report" / "samples"
    folder.mkdir(parents=True)
    # Of a person, and of a training that a resume has left.
    for name in ("step_00000020 (copy).md", "step_1e3.md", "step_00000990.md"):
        (folder / name).write_text("> of nobody")
    for step in range(10, 250, 10):
        write_page_of_step(run.path / "report", "samples", ["# Samples", "", f"- written: > at {step}"], step)
    page = write(tmp_path / "page.html", run)
    assert [text for _, text in page.all("q")] == [f"at {step}" for step in (240, *range(230, 30, -10))]
    folded = [text for _, text in page.all("summary") if text.startswith("After step")]
    assert (folded[0], len(folded)) == ("After step 230", 20)
    assert "Of 23 earlier evaluations the last 20; all are in report/samples." in [text for _, text in page.all("p")]
    assert {path.name for path in folder.iterdir()} >= {"step_00000020 (copy).md", "step_1e3.md"}
    assert not (folder / "step_00000990.md").exists()


def test_markdown_of_any_kind_stays_whole() -> None:
    assert markdown_html("- a\n- b\n\nc > d\n<i>") == [
        *("<ul>", "<li>a</li>", "<li>b</li>", "</ul>"),
        *("<p>c <q>d</q></p>", "<p>&lt;i&gt;</p>"),
    ]


@pytest.mark.parametrize(
    "text",
    ["&", "<", "&lt;", "&amp;", "&amp;lt;", "&&lt;<", "&#60;", "AT&T; R&D & <b>", "a &lt b; &lt", "&amp<"],
)
def test_a_quoted_text_is_shown_as_it_is(text: str) -> None:
    (shown,) = markdown_html(f"said: {quoted(text)}")
    assert unescape(shown) == f"<p>said: <q>{text}</q></p>"
    # Beside what is HTML or an entity to Markdown nothing is escaped.
    assert quoted("AT&T, R & D; &") == "> AT&T, R & D; &"


def test_what_files_say_never_becomes_html(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run<b>", **{EVIL: EVIL})
    labels = {"loss_of": "mode", "units": {"evil": EVIL}, "titles": {"evil": EVIL}}
    names = ("command", "device_name", "attention", "git_commit", "run_id", "platform", "python", "cuda", "strategy")
    run.add("environment", labels=labels, versions={EVIL: EVIL}, **dict.fromkeys(names, EVIL))
    for step in range(1, 5):
        run.train(step, mode=EVIL if step % 2 else "b")
        run.add("evaluation", step, **{f"{EVIL}_evil": 1.0})
    run.add("warning", 4, message=EVIL)
    run.add("end", 4, reason=EVIL)
    (run.path / "report").mkdir()
    (run.path / "report" / "samples.md").write_text(f"# {EVIL}\n- {EVIL}\n{EVIL}\n")
    (run.path / "report" / 'a"><b>.png').write_bytes(PIXEL)
    page = write(tmp_path / "page.html", run, noisy_run(tmp_path / "other"))
    assert len(page.all("script")) == 2
    assert not page.all("b")
    assert all(attributes["src"].startswith("data:image/png") for attributes, _ in page.all("img") if attributes["src"])
    # Whatever stands in an attribute, no element has a handler.
    assert not [name for _, attributes, _ in page.elements for name in attributes if name.startswith("on")]
    assert any(EVIL in chart["title"] for chart in page.data()["charts"])


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = write(tmp_path / "page.html", noisy_run(tmp_path / "run"))
    assert not page.all("link")
    assert not [a for _, a, _ in page.elements if (a.get("src") or a.get("href") or "data:").split(":")[0] != "data"]
    assert "url(" not in page.source
    assert "@import" not in page.source
    (policy,) = [a["content"] for a, _ in page.all("meta") if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'")
    for wanted in ("prefers-color-scheme: dark", "@media print", "width=device-width"):
        assert wanted in page.source


@pytest.mark.parametrize("content", ["", '{"event": "environment"}\n', '{"event": "train", "st', "[1]\n{}\n"])
def test_a_run_without_a_curve_has_a_page(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(content)
    assert cli._main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "page.html")]) == 0
    assert "No curve yet" in Page(tmp_path / "page.html").source


def test_a_report_is_replaced_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = noisy_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert cli._main(["report", "run"]) == 0
    assert cli._main(["report", "run"]) == 0  # over report.html of the first
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    os.mkfifo(tmp_path / "pipe")  # whose writer is not awaited
    refused = {
        "mine.html": "exists and is not a report of accel-train; give another file",
        "pipe": "exists and is not a report of accel-train; give another file",
        "run": "is a directory; give the name of a file",
        "none/page.html": "does not exist; make it, or give another file",
    }
    for output, says in refused.items():
        with pytest.raises(UsageError, match=f"--output .*{says}"):
            cli._main(["report", str(run.path), "--output", output])
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"


def test_a_place_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    run = noisy_run(tmp_path / "run")
    # Permissions would not stop root. A name of 255 bytes is allowed, and the temporary file beside it is longer.
    output = tmp_path / f"{'r' * 250}.html"
    reason = r"cannot be written \(File name too long\); give a file in a directory with write access"
    with pytest.raises(UsageError, match=rf"--output {output}: {reason}"):
        cli._main(["report", str(run.path), "--output", str(output)])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 60, [0, 20, 40, 60]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-3, 7, [-2, 0, 2, 4, 6]), (5, 5, [5])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(ticks)


def test_numbers_of_an_axis_are_short() -> None:
    values = [0, 0.25, 1234, 12_000, 1_500_000, 2e-4, -0.5]
    assert [short(value) for value in values] == ["0", "0.25", "1234", "12k", "1.5M", "2e-4", "-0.5"]


@pytest.mark.parametrize(("last_step", "anchor"), [(400, "middle"), (1500, "end"), (2500, "end")])
def test_a_long_step_at_the_end_of_the_axis_ends_with_the_drawing(last_step: int, anchor: str) -> None:
    grid = "".join(drawing._grid(drawing.Axes(last_step, 0.0, 1.0, logarithmic=False)))
    labels = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">([^<]+)<', grid)
    x, found, text = next(label for label in labels if label[2] == short(last_step))
    assert found == anchor, text
    assert anchor == "middle" or float(x) == drawing.WIDTH


# ------------------------------------------------------------------------------------------------------------ Chromium
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOVER = """
<script>
const svg = document.querySelector("figure.chart svg");
const box = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1, clientY: box.top + 50}));
const first = document.querySelector("figure.chart .tip").textContent;
document.querySelector("figure.chart input[data-curve]").click();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1, clientY: box.top + 50}));
const rest = document.querySelector("figure.chart .tip").textContent;
const hidden = getComputedStyle(document.querySelector('[data-toggle="events"]')).display !== "none";
document.querySelector('[data-toggle="events"]').click();
const events = getComputedStyle(document.querySelector("svg .events")).display;
const cut = [...document.querySelectorAll("svg text")].filter(
  (text) => text.getBoundingClientRect().right > text.ownerSVGElement.getBoundingClientRect().right + 0.5
).map((text) => text.textContent);
const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
document.body.innerHTML = "";
document.title = JSON.stringify({first, rest, events, cut, wide, width: innerWidth});
</script>
"""


def chromium(page: Path, width: int) -> tuple[dict[str, Any], str]:
    """What the probe at the end of the page found, and the lines of the console."""
    command = [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},900", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[-2000:]
    found = json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    return found, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [500, 1200])
def test_a_browser_shows_the_last_point_of_the_log_without_an_error(tmp_path: Path, width: int) -> None:
    run = noisy_run(tmp_path / "run")
    write(tmp_path / "page.html", run)
    page = tmp_path / "probe.html"
    page.write_text((tmp_path / "page.html").read_text().replace("</body>", HOVER + "</body>"))
    found, console = chromium(page, width)
    assert console == ""
    last = {line["mode"]: line for line in lines(run, "train")}
    texts = {}
    for text in found["first"].split("\n"):
        mode, value, step = re.fullmatch(r"(\w+): ([\d.]+) at step (\d+)", text).groups()  # type: ignore[union-attr]
        texts[mode] = (float(value), int(step))
    for mode, line in last.items():
        assert texts[mode] == (pytest.approx(line["loss"], rel=1e-4), line["step"])
    assert found["rest"].split("\n") == found["first"].split("\n")[1:]  # the first curve is switched off
    assert found["events"] == "none"
    assert found["cut"] == []
    assert not found["wide"]  # nothing has to be scrolled sideways


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_browser_would_tell_of_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<title>{"ok": 1}</title><script>nothing.here()</script>')
    assert "nothing is not defined" in chromium(page, 500)[1]
    write(tmp_path / "report.html", noisy_run(tmp_path / "run"))
    loads = '<title>{"ok": 1}</title><img src="http://127.0.0.1:9/x.png">'
    page.write_text((tmp_path / "report.html").read_text().replace("<title>run</title>", loads))
    assert "violates the following Content Security Policy" in chromium(page, 500)[1]


def test_nothing_of_the_page_is_lost_in_json(tmp_path: Path) -> None:
    """Floats are read back with every digit."""
    run = RunDirectory(tmp_path / "run")
    values = [math.pi * 10.0**exponent for exponent in range(-9, 9)]
    for step, value in enumerate(values, 1):
        run.train(step, loss=value)
    assert write(tmp_path / "page.html", run).curves()["Loss", "training loss"][1] == values
