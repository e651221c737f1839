"""``accel-train replay``: the same bits from any step, one-ulp faults found and named, the run untouched."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from accel_train import cli
from accel_train.commands.bundled import find_recipe
from accel_train.config import UsageError
from accel_train.hub.options import HubConfig
from accel_train.hub.push_now import push_now
from accel_train.options.tree import flatten
from accel_train.rerun import agreement, recorded, replay, training
from accel_train.rerun.agreement import Row, Weights
from accel_train.rerun.receipt import receipt_file
from accel_train.rerun.starts import Start
from accel_train.store import commit, manifest, strict_json
from accel_train.store.run_file import write_run
from tests.distributed.launching import Finished
from tests.hub_server import serving
from tests.rerun import recording


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return recording.record("mmdit", tmp_path_factory.mktemp("recorded") / "run")


def command(run: Path, steps: str, folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit code and receipt of a replay."""
    receipt = folder / "receipt.json"
    code = cli._main(["replay", str(run), "--steps", steps, "--receipt", str(receipt), *more])
    content = strict_json.read_object(receipt)
    strict_json.check_seal(content)
    return code, content


def test_a_window_between_two_saves_has_the_same_bits_and_the_run_stays_as_it_was(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording.fork_runs(monkeypatch)
    before = recording.tree(run.directory)
    code, receipt = command(run.directory, "6:11", tmp_path)
    assert recording.tree(run.directory) == before
    assert (code, receipt["verdict"], receipt["first_differing_step"]) == (0, "bit-identical", None)
    assert receipt["checkpoint"]["name"] == "checkpoint_00000004"
    assert receipt["reasons_for_other_bits"] == []
    # From the checkpoint on, so that a difference before the window is found as well.
    losses = run.losses()
    assert [(line["step"], line["values"]["loss"]["replayed"]) for line in receipt["steps"]] == [
        (step, losses[step - 1].hex()) for step in range(5, 12)
    ]
    assert [one["name"] for one in receipt["checkpoints"]] == ["checkpoint_00000008"]
    output = capsys.readouterr().out
    assert "steps up to there are trained to reach it" in output
    assert "verdict: bit-identical" in output


def assert_planted_faults_are_found(run: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = recording.copied(run, tmp_path / "faulty")
    recording.move_loss(found.directory, 7)
    name = recording.move_one_weight(found.checkpoint(8))
    code, receipt = command(found.directory, "4:12", tmp_path)
    assert (code, receipt["verdict"], receipt["first_differing_step"]) == (1, "different", 7)
    assert [line["step"] for line in receipt["steps"] if not line["identical"]] == [7]
    assert [one["identical"] for one in receipt["checkpoints"]] == [False, True]
    assert f"first by name, A recorded, B replayed: {name} " in capsys.readouterr().out
    # The same fault in what the replay begins with: it is trained on, and arrives in the next checkpoint.
    code, receipt = command(found.directory, "8:12", tmp_path)
    assert (code, receipt["verdict"]) == (1, "different")
    assert [one["identical"] for one in receipt["checkpoints"]] == [False]


def test_one_ulp_in_a_loss_or_a_weight_is_found(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording.fork_runs(monkeypatch)
    assert_planted_faults_are_found(run, tmp_path, capsys)


@pytest.mark.slow  # the same of mmdit is quick
def test_the_same_of_operators_and_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording.fork_runs(monkeypatch)
    pde = recording.record("pde", tmp_path / "pde")
    before = recording.tree(pde.directory)
    for window in ("5:11", "0:6"):
        code, receipt = command(pde.directory, window, tmp_path)
        assert (code, receipt["verdict"]) == (0, "bit-identical"), receipt
    assert recording.tree(pde.directory) == before
    assert_planted_faults_are_found(pde, tmp_path, capsys)


@pytest.mark.slow  # a window of a directory is compared above
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub, as in tests/hub
def test_a_run_on_the_hub_is_compared_by_its_checkpoints(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording.fork_runs(monkeypatch)
    with serving(monkeypatch, tmp_path / "hf_home"):
        for step in (4, 8):
            push_now(run.checkpoint(step), HubConfig(repo_id="org/model", include_state=True))
        with pytest.raises(UsageError, match=r"has the checkpoints 4, 8; one at or before step 8 .* up to step 12"):
            replay.replay(replay.Request("hub:org/model", "8:12"))
        with pytest.raises(UsageError, match="does not record its recipe; name it with --recipe"):
            replay.replay(replay.Request("hub:org/model", "4:8"))
        code, receipt = command(Path("hub:org/model"), "4:8", tmp_path, "--recipe", "mmdit")
    assert (code, receipt["verdict"], receipt["reasons_for_other_bits"]) == (0, "bit-identical", [])
    assert receipt["steps"] == []
    assert [one["name"] for one in receipt["checkpoints"]] == ["checkpoint_00000008"]


def test_only_logged_steps_are_compared_and_said(run: Finished, tmp_path: Path) -> None:
    sparse = recording.copied(run, tmp_path / "sparse")
    path = sparse.directory / "metrics.jsonl"
    lines = path.read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("step", 0) % 5 == 0]
    path.write_text("\n".join(kept) + "\n")
    opened = recorded.open_run(str(sparse.directory))
    plan, notices = replay._plan(replay.Request(str(sparse.directory), "8:12"), opened, 8, 12)
    assert (plan.logged, plan.saved) == ([10], [12])
    assert "the run logged 1 of these steps, and only those are compared" in notices
    with pytest.raises(UsageError, match=r"neither a logged step nor a checkpoint.*nearest logged steps are 5 and 10"):
        replay._plan(replay.Request(str(sparse.directory), "5:7"), opened, 5, 7)


def test_what_cannot_be_replayed_is_refused(run: Finished, tmp_path: Path) -> None:
    def refusal(directory: Path, steps: str) -> str:
        with pytest.raises(UsageError) as refused:
            replay.replay(replay.Request(str(directory), steps))
        return str(refused.value)

    assert "ends at step 12" in refusal(run.directory, "4:13")
    assert "two step numbers" in refusal(run.directory, "400-420")
    assert "contains no step" in refusal(run.directory, "8:8")
    pruned = recording.copied(run, tmp_path / "pruned")
    commit.remove(pruned.checkpoint(4))
    said = refusal(pruned.directory, "5:7")
    assert "no checkpoint at or before step 5" in said
    assert "8, 12" in said
    assert "--steps 0:N" in said
    damaged = recording.copied(run, tmp_path / "damaged")
    file = damaged.checkpoint(4) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "refused: " in refusal(damaged.directory, "5:7")


def test_a_receipt_replaces_an_earlier_one_and_nothing_else(run: Finished, tmp_path: Path) -> None:
    before = recording.tree(run.directory)
    mine = tmp_path / "thesis.txt"
    mine.write_text("my thesis")
    for place, reason in {
        run.directory: "is a directory; give the name of a file, such as",
        run.checkpoint(4) / "manifest.json": "exists and is not a receipt of accel-train",
        mine: "exists and is not a receipt of accel-train",
        mine / "receipt.json": "thesis.txt is not a directory; create it, or give another file",
        tmp_path / "absent" / "receipt.json": "absent is not a directory",
        Path("/proc/receipt.json"): "cannot be written",
    }.items():
        with pytest.raises(UsageError, match=f"^--receipt .*{reason}"):
            replay.replay(replay.Request(str(run.directory), "8:12", receipt=str(place)))
    assert recording.tree(run.directory) == before
    assert mine.read_text() == "my thesis"
    earlier = tmp_path / "receipt.json"
    sealed = strict_json.sealed({"schema": 1, "written_at": "2026-01-01T00:00:00Z", "recipe": {}})
    earlier.write_text(json.dumps(sealed))
    assert receipt_file(str(earlier), "replay.json") == earlier


def test_a_run_says_which_recipe_but_not_which_file_is_executed(run: Finished, tmp_path: Path) -> None:
    opened = recorded.open_run(str(run.directory))
    assert recorded.recipe_of(opened, None).name == "mmdit.py"
    mine = tmp_path / "mmdit.py"
    mine.write_text("raise SystemExit('executed')\n")

    def named(recipe: Path | None) -> recorded.RecordedRun:
        environment = {"event": "environment", "recipe": None if recipe is None else str(recipe)}
        return recorded.RecordedRun("run", run.directory, {}, [environment], [])

    with pytest.raises(UsageError, match="differs from the bundled recipe"):
        recorded.recipe_of(named(mine), None)
    # As a notebook records it.
    with pytest.raises(UsageError, match="does not record its recipe; name it with --recipe"):
        recorded.recipe_of(named(None), None)
    assert recorded.recipe_of(named(None), str(mine)) == mine


def test_a_recipe_is_proposed_where_it_lies_and_only_while_it_is_there(
    run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    # A file of that name in the directory of the reader has trained nothing.
    (tmp_path / "elsewhere" / "r.py").write_text("")
    monkeypatch.chdir(tmp_path / "elsewhere")
    own = tmp_path / "r.py"
    own.write_text("")
    environment = {"event": "environment", "command": "r.py demo", "recipe": str(own)}
    opened = recorded.RecordedRun("run", run.directory, {}, [environment], [])
    with pytest.raises(
        UsageError, match=f"was trained by {own}, which is not a recipe of this package; give --recipe {own}$"
    ):
        recorded.recipe_of(opened, None)
    own.unlink()
    with pytest.raises(UsageError, match=f"was trained by {own}, .*; the file no longer exists: if it has moved"):
        recorded.recipe_of(opened, None)


def test_a_run_records_where_its_recipe_lies(run: Finished) -> None:
    first = recorded.open_run(str(run.directory)).records[0]
    assert Path(first["recipe"]) == Path(__file__).parents[2] / "recipes" / "mmdit.py"


def test_options_are_those_of_the_checkpoint(run: Finished, tmp_path: Path) -> None:
    changed = recording.copied(run, tmp_path / "changed")
    saved = recorded.open_run(str(changed.directory)).saved
    before = saved["experiment"]["optimizer.lr"]
    write_run(changed.directory, {**saved, "experiment": saved["experiment"] | {"optimizer.lr": 0.5}})
    opened = recorded.open_run(str(changed.directory))
    checkpoint, _ = opened.newest_at(9)
    assert checkpoint is not None
    assert checkpoint.step == 8
    assert recorded.options_at(opened, checkpoint)["optimizer"]["lr"] == before
    assert recorded.changed_since(opened, checkpoint) == [f"optimizer.lr {before!r} -> 0.5"]


def test_options_changed_at_a_resume_are_named_and_the_steps_after_it_are_not_judged(tmp_path: Path) -> None:
    def start(step: int, lr: float, decay: int | None, *allow: str) -> list[dict[str, Any]]:
        config = {
            "optimizer": {"lr": lr},
            "schedule": {"decay_steps": decay},
            "health": {"window": step},
            "allow": allow,
        }
        resumed = [{"event": "resume", "step": step}] if step else []
        return [{"event": "environment"}, {"event": "config", "config": config}, *resumed]

    experiment = {"optimizer.lr": 0.1, "schedule.decay_steps": None, "health.window": 0}
    before = {"experiment": experiment, "resolved": {"schedule.decay_steps": 60}}
    resolved = {"schedule.decay_steps": 20}
    now = {"experiment": experiment | {"optimizer.lr": 0.2} | resolved, "resolved": resolved}
    records = [*start(0, 0.1, None), *start(6, 0.2, None, "optimizer"), *start(8, 0.2, 20, "schedule.decay_steps")]
    run = recorded.RecordedRun("run", tmp_path, now, records, [])
    rows = [Row(step, {"loss": (1.0, 1.0 if step < 7 else 2.0)}) for step in range(4, 10)]
    weights = [Weights(6, "checkpoint_6", [], True, 0.0), Weights(9, "checkpoint_9", [], False, 1.0)]

    def judged(first: int) -> list[str]:
        saved = manifest.Checkpoint(tmp_path, first, before)
        plan = replay._Plan(run, find_recipe("mmdit"), (first, 9), saved, [], 0, [])
        compared = [[one for one in part if one.step > first] for part in (rows, weights)]
        return replay._verdict_lines(replay._judge(plan, *compared, [], 1e-5))  # type: ignore[arg-type]

    lr = "options changed with --allow when the run was resumed at step 6: optimizer.lr 0.1 -> 0.2"
    decay = "options changed with --allow when the run was resumed at step 8: schedule.decay_steps 60 -> 20"
    lines = judged(3)
    assert lines[1] == lr
    assert lines[2] == decay
    assert lines[3] == "the replay keeps the options of its checkpoint, so only steps up to step 6 are judged"
    assert lines[4].endswith("every bit up to step 6 must be the same")
    assert lines[5] == "verdict: bit-identical"
    assert judged(6)[-1] == "verdict: not judged"
    other = r"other options, which it no longer has: optimizer\.lr 0\.1 -> 0\.2, schedule\.decay_steps None -> 20\)"
    with pytest.raises(UsageError, match=other):
        replay._beginning(run, find_recipe("mmdit"), 0)


def test_only_options_with_an_effect_on_the_steps_count_as_changed(tmp_path: Path) -> None:
    pde = find_recipe("pde")
    moved = {"path": "/b", "workers": 2, "cache_dir": "/b"}

    def changed(
        before: dict[str, Any], after: dict[str, Any], *allow: str, resolved: dict[str, Any] | None = None
    ) -> list[str]:
        records: list[dict[str, Any]] = []
        for config in ({**before, "allow": []}, {**after, "allow": allow}):
            records += [{"event": "environment"}, {"event": "config", "config": config}]
        records.append({"event": "resume", "step": 4})
        saved = {"experiment": flatten(after) | {"data_fingerprint": "f"}, "resolved": resolved}
        run = recorded.RecordedRun("run", tmp_path, saved, records, [])
        used = recorded.values_of({"experiment": flatten(before), "resolved": resolved})
        since = run.changed_since_the_start(pde)
        assert run.allowed_changes(1, 8, used, pde) == ({4: since} if since else {})
        return since

    here = {"path": "/a", "workers": 0, "cache_dir": "/a"}
    assert changed({"data": here}, {"data": moved}, "data") == []
    assert changed({"log": {"log_every": 1}}, {"log": {"log_every": 2}}, "log") == []
    # Data of another place may be other data only if a start was told to accept them.
    paths = ["data.path '/a' -> '/b'"]
    assert changed({"data": here}, {"data": moved}, "data", "data_fingerprint") == paths
    assert changed({"data": here | {"changed": "allow"}}, {"data": moved | {"changed": "allow"}}, "data") == paths
    # None is a value of its own, except for an option whose value a start derived.
    given, left = {"schedule": {"decay_steps": 10}}, {"schedule": {"decay_steps": None}}
    assert changed(given, left, "schedule", resolved={"schedule.decay_steps": 10}) == []
    bounded, free = {"plateau": {"patience": 3}}, {"plateau": {"patience": None}}
    assert changed(bounded, free, "plateau", resolved={}) == ["plateau.patience 3 -> None"]


def test_a_change_is_of_the_resume_that_made_it(tmp_path: Path) -> None:
    """Another resume may put an option back, or keep one that it leaves to be derived."""
    records: list[dict[str, Any]] = []
    for step, lr, decay in ((0, 0.1, None), (4, 0.2, 20), (6, 0.2, None), (8, 0.1, 30)):
        config = {"optimizer": {"lr": lr}, "schedule": {"decay_steps": decay}, "allow": ["optimizer", "schedule"]}
        records += [{"event": "environment"}, {"event": "config", "config": config}, {"event": "resume", "step": step}]
    run = recorded.RecordedRun("run", tmp_path, {"resolved": {"schedule.decay_steps": 30}}, records, [])
    used = {"optimizer.lr": 0.1, "schedule.decay_steps": 60}
    assert run.allowed_changes(1, 9, used, find_recipe("mmdit")) == {
        4: ["optimizer.lr 0.1 -> 0.2", "schedule.decay_steps 60 -> 20"],
        8: ["optimizer.lr 0.2 -> 0.1", "schedule.decay_steps 20 -> 30"],
    }


def test_a_copy_links_files_one_by_one_so_that_nothing_is_deleted_through_it(run: Finished, tmp_path: Path) -> None:
    before = recording.tree(run.directory)
    original = commit.verify(run.checkpoint(8))
    linked = training.link_checkpoint(original, tmp_path)
    assert commit.verify(linked).manifest == original.manifest
    commit.remove(linked)
    assert not linked.exists()
    assert recording.tree(run.directory) == before


@pytest.mark.parametrize(
    ("saved", "last", "every", "kept"),
    [
        ([10, 20], 20, 10, [10, 20]),
        ([20], 20, 0, [20]),
        ([6, 9], 12, 3, [6, 9]),
        ([], 7, 0, []),
        # Every step would have to be saved for the sake of step 101.
        ([101, 150, 200], 220, 50, [150, 200]),
    ],
)
def test_saves_that_are_made_again(saved: list[int], last: int, every: int, kept: list[int]) -> None:
    assert training.steps_to_save(saved, last) == (every, kept)


@pytest.mark.parametrize(
    ("steps", "last", "every"),
    [([10, 20, 30], 30, 10), ([1, 10, 20], 25, 10), ([50, 60, 100], 100, 10), ([1, 30], 30, 30), ([], 9, 9)],
)
def test_every_recorded_line_is_logged_again(steps: list[int], last: int, every: int) -> None:
    options = training.log_steps({"log": {"log_every": 7, "project": "p"}}, steps, last)
    assert options == {"log": {"log_every": every, "project": "p"}}
    assert all(step % every == 0 or step in (1, last) for step in steps)


def test_verdicts() -> None:
    def row(a: float, b: float) -> Row:
        return Row(1, {"loss": (a, b)})

    def weights(identical: bool, relative: float) -> Weights:
        return Weights(1, "checkpoint", [], identical, relative)

    same, close, far = row(2.0, 2.0), row(2.0, math.nextafter(2.0, 3.0)), row(2.0, 2.1)
    nan = row(math.nan, math.nan)
    cases: list[tuple[list[Row], list[Weights], list[str], str]] = [
        ([same, nan], [weights(True, 0)], [], "bit-identical"),
        ([same, nan], [weights(True, 0)], ["world_size 1 -> 2"], "bit-identical"),
        ([close], [], [], "different"),
        ([close], [], ["world_size 1 -> 2"], "equal within reduction order"),
        ([same], [weights(False, 1e-9)], [], "different"),
        ([same], [weights(False, 1e-9)], ["world_size 1 -> 2"], "equal within reduction order"),
        ([same], [weights(False, math.inf)], ["world_size 1 -> 2"], "different"),
        ([close, far], [], ["world_size 1 -> 2"], "different"),
        ([row(2.0, math.nan)], [], ["world_size 1 -> 2"], "different"),
        ([row(0.0, 1e-9)], [], ["world_size 1 -> 2"], "different"),
    ]
    for rows, compared, reasons, expected in cases:
        assert agreement.verdict(rows, compared, reasons, 1e-5) == expected


def test_a_step_that_the_replay_lacks_differs() -> None:
    rows = agreement.rows_of({1: {"loss": 1.0}, 2: {"loss": 2.0, "grad_norm": 1.0}}, {1: {"loss": 1.0}})
    assert [row.differing for row in rows] == [[], ["loss", "grad_norm"]]


def test_reasons_for_other_bits() -> None:
    def start(options: dict[str, Any] | None = None, **environment: Any) -> Start:
        facts = {"device": "cpu", "versions": {"torch": "2.13"}, "world_size": 1, "time": 1.0}
        return Start(facts | environment, options or {"micro_batch_size": 4})

    assert agreement.reasons_for_other_bits([start()], start(time=2.0)) == []
    assert agreement.reasons_for_other_bits([start(), start(world_size=2)], start()) == ["world_size 2 -> 1"]
    assert agreement.reasons_for_other_bits([start()], start(versions={"torch": "2.14"})) == [
        "torch version 2.13 -> 2.14"
    ]
    assert agreement.reasons_for_other_bits([start()], start({"micro_batch_size": 2})) == ["micro_batch_size 4 -> 2"]
    bf16 = start(precision="bf16", attention="sdpa_flash", attention_kernels=["flash"], world_size=2)
    asked = agreement.reasons_for_other_bits([start(precision="fp32", attention="sdpa_math")], bf16, {"precision"})
    # What the change brings is of the change.
    assert asked == ["world_size 1 -> 2"]
    assert "CUDA" in str(agreement.reasons_for_other_bits([start(device="cuda")], start(device="cuda")))


def test_the_start_behind_a_step_counts_whether_the_step_was_logged_or_not() -> None:
    """Without a line of the window, the log still says on which layout it was trained."""

    def start(processes: int, at: int, *logged: int) -> list[dict[str, Any]]:
        resumed = [{"event": "resume", "step": at}] if at else []
        lines = [{"event": "train", "step": step} for step in logged]
        return [{"event": "environment", "world_size": processes}, {"event": "config"}, *resumed, *lines]

    # The second start did nothing before the third began at the same checkpoint.
    records = [*start(2, 0, 1, 50, 100, 150), *start(3, 200), *start(1, 200, 250, 300, 350, 400)]
    opened = recorded.RecordedRun("run", Path("run"), {}, records, [])

    def processes(first: int, last: int) -> list[int]:
        return [found.environment["world_size"] for found in opened.starts(first, last)]

    assert processes(101, 130) == [2]
    assert processes(101, 200) == [2]
    assert processes(151, 240) == [2, 1]
    assert processes(201, 240) == [1]
    assert recorded.RecordedRun("run", Path("run"), {}, [], []).starts(1, 9) == []


def test_without_a_log_the_layout_is_that_of_the_compared_checkpoints(run: Finished, tmp_path: Path) -> None:
    """And not of a newer one, which another start may have saved, or which is damaged."""
    copied = recording.copied(run, tmp_path / "copied")
    (copied.directory / "metrics.jsonl").unlink()
    layout = manifest.read(copied.checkpoint(8))["layout"]
    commit.rewrite_manifest(copied.checkpoint(8), {"layout": layout | {"world_size": 2}})

    def reasons() -> list[str]:
        opened = recorded.open_run(str(copied.directory))
        plan, _ = replay._plan(replay.Request(str(copied.directory), "4:8", recipe="mmdit"), opened, 4, 8)
        assert plan.saved == [8]
        return replay._other_layouts(plan, {"layout": layout})

    assert reasons() == ["world_size 2 -> 1"]
    file = copied.checkpoint(12) / "manifest.json"
    file.write_bytes(file.read_bytes()[:-9])
    assert reasons() == ["world_size 2 -> 1"]
    file = copied.checkpoint(8) / "manifest.json"
    file.write_bytes(file.read_bytes()[:-9])
    assert reasons() == []


def test_a_term_that_differs_alone_is_shown_in_its_row() -> None:
    same = {"loss": (1.0, 1.0), "grad_norm": (2.0, 2.0)}
    rows = [
        Row(1, {**same, "loss_class": (0.5, 0.5)}),
        Row(2, {**same, "loss_class": (0.5, 0.75)}),
        Row(3, {**same, "loss": (1.0, 1.5), "loss_class": (0.5, 0.25)}),
    ]
    ends = [line[line.index("1", 20) :].split()[2:] for line in agreement.table(rows, [])[1:]]
    assert ends == [["0", "0"], ["0", "0", *"loss_class 0.25 <- first difference".split()], ["0.5", "0"]]


def test_rows_around_the_first_difference_are_shown() -> None:
    rows = [Row(step, {"loss": (1.0, 1.0 if step < 50 else 2.0)}) for step in range(100)]
    shown = agreement.rows_to_show(rows)
    assert {0, 9, 48, 49, 50, 57, 90, 99} <= set(shown)
    assert 30 not in shown
    assert len(shown) <= agreement.MOST_ROWS
    assert agreement.rows_to_show(rows[:20]) == list(range(20))
