"""The run directory: start or resume, whose experiment it is, and its lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accel_train.checkpoints import opening, policy
from accel_train.checkpoints.fetch import CheckpointsUnusableError, find_weights
from accel_train.checkpoints.opening import open_run
from accel_train.checkpoints.policy import RunOptions
from accel_train.checkpoints.run import Run, WeightsAssets, assets_of_weights, earlier_assets, earlier_checkpoints
from accel_train.commands.places import find_place
from accel_train.config import UsageError
from accel_train.data.tables.ledger import Span, write_ledger
from accel_train.experiment_options import FREE_TO_CHANGE
from accel_train.options.tree import config_text, defaults_tree, experiment_tree, flatten
from accel_train.store import commit, strict_json
from accel_train.store import lock as locks
from accel_train.store.run_file import write_run
from tests.store.test_commit import lost, make


@dataclass(frozen=True)
class Inner:
    lr: float = 0.1
    decay_steps: int | None = None


@dataclass(frozen=True)
class Config:
    output_dir: str
    seed: int = 0
    max_steps: int = 10
    micro_batch_size: int = 4
    resume: str = "auto"
    allow: tuple[str, ...] = ()
    overwrite: bool = False
    optimizer: Inner = field(default_factory=Inner)


def options_of(config: Config) -> RunOptions:
    return RunOptions(
        config.output_dir,
        flatten(experiment_tree(config)),
        config_text(config),
        free_to_change=FREE_TO_CHANGE,
        resume=config.resume,
        allow=config.allow,
        overwrite=config.overwrite,
        evaluate_only=getattr(config, "evaluate_only", False),
        init_from=getattr(config, "init_from", None),
    )


def test_a_run_that_has_started_again_goes_on_whatever_its_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the checkpoint that its command names, once more, and without deleting what it has trained since."""
    asked = [RunOptions("run", {}, resume="other@5"), RunOptions("run", {}, overwrite=True)]
    assert [policy.of_this_start(options) for options in asked] == asked
    monkeypatch.setattr(policy, "started_again", lambda: True)
    assert [policy.of_this_start(options) for options in asked] == [RunOptions("run", {})] * 2


def test_a_finished_run_names_the_option_with_its_length(accelerator: Accelerator, tmp_path: Path) -> None:
    run = start(accelerator, Config(str(tmp_path)))
    assert run.finished_notices(0, "max_epochs", ", please")[0] == (
        "the run is finished: step 0 of 0; raise --max_epochs to continue, please"
    )


def test_results_are_those_that_exist(accelerator: Accelerator, tmp_path: Path) -> None:
    run = start(accelerator, Config(str(tmp_path)))
    assert run.results(5) == []
    make_with_assets(run.directory, 5)
    run.report_directory().mkdir()
    (run.report_directory() / "evaluation.json").touch()
    assert run.results(5) == ["checkpoints/checkpoint_00000005", "report/evaluation.json"]


def test_changed_data_and_a_checkpoint_of_the_hub_are_refused(tmp_path: Path) -> None:
    options = options_of(Config(str(tmp_path), resume="hub:me/it@5"))
    assert earlier_assets(options) is None
    changed = replace(options, experiment=options.experiment | {"data.changed": "allow"})
    with pytest.raises(UsageError, match=r"--data.changed allow with --resume hub:me/it@5: .*--local-dir FOLDER"):
        earlier_assets(changed)
    # The run in the directory goes on from its own.
    made = make_with_assets(tmp_path, 5)
    assert earlier_assets(changed) == made / "assets"


def make_with_assets(run: Path, step: int) -> Path:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    return make(run / "checkpoints", step, more="assets/scales.json")


def test_damaged_assets_are_passed_over(tmp_path: Path) -> None:
    options = options_of(Config(str(tmp_path)))
    older, newer = (make_with_assets(tmp_path, step) for step in (5, 10))
    assert earlier_assets(options) == newer / "assets"
    (newer / "assets" / "scales.json").write_bytes(b"WEIGHTS")
    assert earlier_assets(options) == older / "assets"
    (older / "assets" / "scales.json").unlink()
    assert earlier_assets(options) is None


def test_assets_of_the_weights_that_a_start_takes(tmp_path: Path) -> None:
    options = options_of(Config(str(tmp_path / "run")))
    other = make_with_assets(tmp_path / "other", 5)
    assert assets_of_weights(options) is None
    new = WeightsAssets(other / "assets", resumes=False)
    for place in (tmp_path / "other", tmp_path / "other" / "checkpoints", other):
        started = replace(options, init_from=str(place))
        assert assets_of_weights(started) == new
    (tmp_path / "export" / "assets").mkdir(parents=True)
    export = replace(options, init_from=str(tmp_path / "export"))
    assert assets_of_weights(export) == WeightsAssets(tmp_path / "export" / "assets", resumes=False)
    assert assets_of_weights(replace(options, init_from=str(tmp_path / "nowhere"))) is None
    # A checkpoint of its own comes first, unless it is to be deleted.
    own = make_with_assets(tmp_path / "run", 7)
    assert assets_of_weights(started) == WeightsAssets(own / "assets", resumes=True)
    assert assets_of_weights(replace(started, overwrite=True)) == new
    named = replace(options, output_dir=str(tmp_path / "unused"), resume=str(other))
    assert assets_of_weights(named) == WeightsAssets(other / "assets", resumes=True)


def test_other_data_and_a_checkpoint_of_the_hub_are_refused_where_assets_belong_to_weights(tmp_path: Path) -> None:
    options = options_of(Config(str(tmp_path), resume="hub:me/it@5"))
    assert assets_of_weights(options) is None
    with pytest.raises(UsageError, match=r"--allow data_fingerprint with --resume hub:me/it@5: .*--local-dir FOLDER"):
        assets_of_weights(replace(options, allow=("seed", "data_fingerprint")))


def start(
    accelerator: Accelerator, config: Config, data: str = "d" * 8, decay: int = 10, *, trains: bool = True
) -> Run:
    run = open_run(options_of(config), accelerator, data, {"optimizer.decay_steps": decay})
    if trains:
        run.note_training()
    run.close()
    return run


def test_start_and_resume(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    first = start(accelerator, config)
    assert first.checkpoint is None
    assert "fresh start" in first.decision
    make(first.checkpoints, 7)
    again = start(accelerator, replace(config, max_steps=20, micro_batch_size=1), decay=20)
    assert (again.start_step, again.run_id) == (7, first.run_id)
    assert again.resolved("optimizer.decay_steps") == 10  # the first start's


@pytest.mark.parametrize(
    ("change", "data", "named"),
    [
        ({"seed": 1}, "d" * 8, "seed: 0 there, 1 now"),
        ({"optimizer": Inner(lr=0.2)}, "d" * 8, "optimizer.lr: 0.1 there, 0.2 now"),
        ({"optimizer": Inner(decay_steps=30)}, "d" * 8, "optimizer.decay_steps: 10 there, 30 now"),
        ({}, "other", "data_fingerprint"),
    ],
)
def test_another_experiment_is_refused_and_can_be_allowed(
    accelerator: Accelerator, tmp_path: Path, change: dict[str, Any], data: str, named: str
) -> None:
    config = Config(str(tmp_path / "run"))
    start(accelerator, config)
    changed = replace(config, **change)
    with pytest.raises(UsageError, match=named) as refused:
        start(accelerator, changed, data)
    # Of the same files, and with the same options, other versions may have made other samples.
    assert ("if the files are the same, the run began with another version" in str(refused.value)) == (data == "other")
    key = str(refused.value).rsplit("--allow ", 1)[1]
    allowed = start(accelerator, replace(changed, allow=(key,)), data)
    assert "; changed, as --allow permits: " + named in allowed.decision
    start(accelerator, changed, data)  # what was allowed once is the experiment from then on


def test_an_option_added_since_the_run_began_counts_as_its_default(accelerator: Accelerator, tmp_path: Path) -> None:
    options = replace(options_of(Config(str(tmp_path / "run"))), defaults=flatten(defaults_tree(Config)))
    earlier = dict(options.experiment)
    del earlier["optimizer.lr"]
    assert "output_dir" not in options.defaults
    first = open_run(replace(options, experiment=earlier), accelerator, "d" * 8)
    first.note_training()
    first.close()
    changed = replace(options, experiment={**options.experiment, "optimizer.lr": 0.2})
    with pytest.raises(UsageError, match=r"optimizer\.lr: 0\.1 there, 0\.2 now"):
        open_run(changed, accelerator, "d" * 8)
    resumed = open_run(options, accelerator, "d" * 8)
    assert resumed.run_id == first.run_id
    # Its default may change training, which only the person who added it can know.
    assert "; the run began without optimizer.lr 0.1. If one of these changes training" in resumed.decision
    resumed.note_training()
    resumed.close()
    again = open_run(options, accelerator, "d" * 8)
    assert "began without" not in again.decision
    again.close()


def test_a_resume_that_is_refused_before_its_first_step_changes_nothing(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    config = Config(str(tmp_path / "run"))
    first = start(accelerator, config)
    make(first.checkpoints, 7)
    written = [first.directory / name for name in ("run.json", "config.yaml")]
    before = [file.read_bytes() for file in written]
    changed = replace(config, seed=1, allow=("seed",))
    start(accelerator, changed, trains=False)
    assert [file.read_bytes() for file in written] == before
    assert start(accelerator, config).start_step == 7
    start(accelerator, changed)
    assert "seed: 1" in (first.directory / "config.yaml").read_text()
    with pytest.raises(UsageError, match="seed: 1 there, 0 now"):
        start(accelerator, config)


def test_overwrite_forgets_what_was_pushed(accelerator: Accelerator, tmp_path: Path) -> None:
    """Also where somebody has deleted the checkpoints by hand."""
    config = Config(str(tmp_path / "run"))
    first = start(accelerator, config)
    first.checkpoints.rmdir()
    (first.directory / "hub" / "queue").mkdir(parents=True)
    start(accelerator, replace(config, overwrite=True))
    assert not (first.directory / "hub").exists()


def test_overwrite_empties_folders_that_are_links_and_keeps_the_links(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    run = start(accelerator, config)
    make(run.checkpoints, 7)
    (run.directory / "hub" / "queue").mkdir(parents=True)
    (run.directory / "report").mkdir()
    (run.directory / "report" / "index.md").write_text("old")
    for name in ("checkpoints", "report", "hub"):
        (run.directory / name).rename(tmp_path / name)
        (run.directory / name).symlink_to(tmp_path / name)
    (tmp_path / "checkpoints" / "thesis").mkdir()
    with pytest.raises(UsageError, match=r"would delete thesis in .*/checkpoints, to which .* is a link"):
        start(accelerator, replace(config, overwrite=True))
    assert (tmp_path / "report" / "index.md").exists()
    (tmp_path / "checkpoints" / "thesis").rmdir()
    assert "fresh start" in start(accelerator, replace(config, overwrite=True)).decision
    for name in ("checkpoints", "report", "hub"):
        assert (run.directory / name).is_symlink()
        assert list((tmp_path / name).iterdir()) == []


@pytest.mark.parametrize("run_json", [None, "{}", '{"experiment_of": "mine"}'])
def test_overwrite_deletes_nothing_that_no_run_has_written(
    accelerator: Accelerator, tmp_path: Path, run_json: str | None
) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "thesis.md").write_text("mine")
    if run_json is not None:
        (tmp_path / "run.json").write_text(run_json)
    with pytest.raises(UsageError, match=r"overwrite: true would delete report.* which is not a run"):
        start(accelerator, Config(str(tmp_path), overwrite=True))
    assert (tmp_path / "report" / "thesis.md").read_text() == "mine"
    (tmp_path / "report" / "thesis.md").unlink()
    (tmp_path / "report").rmdir()
    (tmp_path / "run.json").unlink(missing_ok=True)
    (tmp_path / "notes.md").write_text("stays")
    assert "fresh start" in start(accelerator, Config(str(tmp_path), overwrite=True)).decision
    assert (tmp_path / "notes.md").read_text() == "stays"


def test_weights_come_from_one_place(accelerator: Accelerator, tmp_path: Path) -> None:
    """Also with --allow, because another init_from would have no effect. The one of the checkpoint's run is its own."""
    first = start(accelerator, WithWeights(str(tmp_path / "first"), init_from=None))
    source = make(first.checkpoints, 3)
    began_at = {**first.saved["experiment"], "init_from": "a"}
    commit.rewrite_manifest(source, {"experiment": began_at, "resolved": {"optimizer.decay_steps": 10}})
    config = WithWeights(str(tmp_path / "second"), resume=str(source), init_from="b")
    for allow in ((), ("init_from",)):
        with pytest.raises(UsageError, match=r"init_from: b: the weights come from resume: .*; leave init_from out"):
            start(accelerator, replace(config, allow=allow))
    assert not list((tmp_path / "second" / "checkpoints").glob("checkpoint_*"))
    assert start(accelerator, replace(config, init_from="a", output_dir=str(tmp_path / "third"))).start_step == 3
    dropped = replace(config, init_from=None, allow=("init_from",), output_dir=str(tmp_path / "fourth"))
    assert start(accelerator, dropped).start_step == 3


def test_other_weights_for_a_run_with_a_checkpoint_are_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    """A resume would not read them, so --allow takes nothing here and is not advised. Before a save they are read."""
    weights = {name: make(tmp_path / name, 1) for name in ("a", "b")}
    config = WithWeights(str(tmp_path / "run"), init_from=str(weights["a"]))
    other = replace(config, init_from=str(weights["b"]))
    start(accelerator, config)
    allowed = start(accelerator, replace(other, allow=("init_from",)))
    assert (allowed.initial_weights, allowed.saved["experiment"]["init_from"]) == (weights["b"], str(weights["b"]))
    start(accelerator, replace(config, allow=("init_from",)))
    make(allowed.checkpoints, 3)
    for allow in ((), ("init_from",)):
        with pytest.raises(UsageError, match=r"init_from: .*/b/.* already contains a run with checkpoints") as refused:
            start(accelerator, replace(other, allow=allow))
        assert "--allow" not in str(refused.value)
        assert f"give --init_from {weights['a']}, as the run began" in str(refused.value)
    assert start(accelerator, config).start_step == 3
    assert start(accelerator, replace(other, overwrite=True)).initial_weights == weights["b"]


RUN_JSON = [
    ("cut", lambda p: p.write_text(p.read_text()[:100])),
    ("emptied", lambda p: p.write_text("")),
    ("a bit", lambda p: p.write_text(p.read_text().replace('"seed": 0', '"seed": 1'))),
    ("a type", lambda p: write_run(p.parent, {"run_id": "a", "experiment": [], "resolved": {}})),
    ("lacking", lambda p: write_run(p.parent, {})),
    ("deep", lambda p: p.write_text("[" * 100_000)),
    ("twice", lambda p: p.write_text('{"schema": 2, "schema": 2}')),
    ("huge", lambda p: p.write_text('{"schema": 1e999}')),
    ("a list", lambda p: p.write_text("[]")),
    ("missing", lambda p: p.unlink()),
    ("a directory", lambda p: (p.unlink(), p.mkdir())),
    ("a FIFO", lambda p: (p.unlink(), os.mkfifo(p))),
    ("a link", lambda p: (p.unlink(), p.symlink_to("/nowhere"))),
]


@pytest.mark.fault(
    "R1",
    injected="run.json cut, emptied, changed by a bit, of wrong types, nested deeply, gone; a directory, a FIFO, a "
    "link in its place",
    outcome="rebuilt from the newest checkpoint, with a warning; exit 2 where there is none",
)
@pytest.mark.parametrize("harm", [pytest.param(harm, id=name) for name, harm in RUN_JSON])
def test_a_damaged_run_json(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object]
) -> None:
    config = Config(str(tmp_path / "run"))
    first = start(accelerator, config)
    path = make(first.checkpoints, 7)
    facts = {"run_id": first.run_id, "experiment": first.saved["experiment"], "resolved": first.saved["resolved"]}
    commit.rewrite_manifest(path, facts)
    harm(first.directory / "run.json")
    assert opening.values_of_first_start(options_of(config)) == {"optimizer.decay_steps": 10}
    with pytest.raises(UsageError, match="seed: 0 there, 1 now"):
        start(accelerator, replace(config, seed=1))
    again = start(accelerator, replace(config, max_steps=20), decay=20)
    assert "its content is taken from the manifest of checkpoint_00000007" in caplog.text
    assert (again.start_step, again.run_id, again.resolved("optimizer.decay_steps")) == (7, first.run_id, 10)
    caplog.clear()
    start(accelerator, config)
    assert not caplog.text
    shutil.rmtree(path)
    harm(first.directory / "run.json")
    if (first.directory / "run.json").exists() or (first.directory / "run.json").is_symlink():
        with pytest.raises(UsageError, match="no checkpoint there says what the experiment is"):
            start(accelerator, config)
    assert "fresh start" in start(accelerator, replace(config, overwrite=True)).decision


@pytest.mark.parametrize("text", ['{"checkpoint": "checkpoint_00000007", "attempts": 3}', "[" * 100_000, "{}", None])
def test_a_damaged_note_of_loading_counts_no_crash(accelerator: Accelerator, tmp_path: Path, text: str | None) -> None:
    config = Config(str(tmp_path / "run"))
    make(start(accelerator, config).checkpoints, 7)
    note = tmp_path / "run" / "loading.json"
    note.write_text(text) if text is not None else note.mkdir()
    run = open_run(options_of(config), accelerator, "d" * 8)
    assert run.start_step == 7
    with run.loading(last=False):
        assert strict_json.read(note)["attempts"] == 1
    with run.loading(last=True):
        pass
    assert not note.exists()
    run.close()


def test_a_start_that_was_refused_before_it_trained_binds_nobody(accelerator: Accelerator, tmp_path: Path) -> None:
    """Its options were wrong; those of the next start are another experiment, whatever they derive."""
    config = Config(str(tmp_path / "run"))
    refused = start(accelerator, replace(config, seed=1), "other", trains=False)
    run = start(accelerator, config, decay=20, trains=False)
    assert "fresh start" in run.decision
    assert run.run_id != refused.run_id
    assert run.resolved("optimizer.decay_steps") == 20
    make(run.checkpoints, 3)
    with pytest.raises(UsageError, match="seed: 0 there, 1 now"):  # now there is something to lose
        start(accelerator, replace(config, seed=1))


def test_a_checkpoint_that_was_set_aside_stops_every_start(accelerator: Accelerator, tmp_path: Path) -> None:
    """Three starts died while they loaded the only one: neither the next start nor a later one begins at step 0."""
    config = Config(str(tmp_path / "run"))
    run = start(accelerator, config)
    path = make(run.checkpoints, 3)
    for _ in range(3):
        run = open_run(options_of(config), accelerator, "d" * 8)
        with pytest.raises(RuntimeError, match="torn"), run.loading(last=False):
            raise RuntimeError("torn")
        run.close()
    for _ in range(2):
        with pytest.raises(CheckpointsUnusableError, match=r"checkpoint_00000003\.bad: .*set aside"):
            start(accelerator, config)
    run_file = tmp_path / "run" / "run.json"
    kept = run_file.read_bytes()
    run_file.unlink()
    with pytest.raises(UsageError, match="no checkpoint there says what the experiment is"):
        start(accelerator, config)
    run_file.write_bytes(kept)
    path.with_name(f"{path.name}.bad").rename(path)
    assert start(accelerator, config).start_step == 3


def test_a_start_that_has_loaded_forgets_those_that_died(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    path = make(start(accelerator, config).checkpoints, 3)

    def begin(error: type[Exception] | None) -> None:
        run = open_run(options_of(config), accelerator, "d" * 8)
        with suppress(RuntimeError), run.loading(last=False):
            pass
        with suppress(RuntimeError), run.loading(last=True):
            if error is not None:
                raise error("torn")
        run.close()

    for error in (RuntimeError, RuntimeError, None, RuntimeError, RuntimeError):
        begin(error)
    assert start(accelerator, config).start_step == 3
    begin(RuntimeError)
    with pytest.raises(CheckpointsUnusableError, match="set aside"):
        start(accelerator, config)
    assert not path.exists()


def test_a_step_is_set_aside_again(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    run = start(accelerator, config)
    make(run.checkpoints, 2)
    for number in range(3):
        path = make(run.checkpoints, 3)
        for _ in range(3):
            run = open_run(options_of(config), accelerator, "d" * 8)
            with pytest.raises(RuntimeError, match="torn"), run.loading(last=False):
                raise RuntimeError("torn")
            run.close()
        assert start(accelerator, config).start_step == 2
        ending = ("bad", "2.bad", "3.bad")[number]
        assert (path.with_name(f"{path.name}.{ending}") / "manifest.json").is_file()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_full_device_and_ctrl_c_are_not_the_fault_of_the_checkpoint(
    accelerator: Accelerator, tmp_path: Path, error: type[BaseException]
) -> None:
    config = Config(str(tmp_path / "run"))
    make(start(accelerator, config).checkpoints, 3)
    for _ in range(4):
        run = open_run(options_of(config), accelerator, "d" * 8)
        with pytest.raises(error), run.loading(last=False):
            raise error
        run.close()
    assert start(accelerator, config).start_step == 3


STOPPED_WHILE_LOADING = """
import os, signal, sys
from pathlib import Path
from accel_train.checkpoints.run import counted
from accel_train.runtime.early_stop import leave_when_asked
from accel_train.store import commit
leave_when_asked()
run = Path(sys.argv[1])
with counted(run, commit.open_verified(run / "checkpoints" / "checkpoint_00000003"), last=False):
    assert (run / "loading.json").exists()
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_request_to_stop_is_no_start_that_died(tmp_path: Path) -> None:
    make(tmp_path / "checkpoints", 3)
    command = [sys.executable, "-c", STOPPED_WHILE_LOADING, str(tmp_path)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 75
    assert not (tmp_path / "loading.json").exists()


def test_nothing_is_deleted_for_a_place_that_may_not_be_there(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    path = make(start(accelerator, config).checkpoints, 3)
    for place in (str(path), str(tmp_path / "typing-error"), "hub:org/name@3"):
        with pytest.raises(UsageError, match=r"overwrite: true with resume: .*unused --output_dir"):
            start(accelerator, replace(config, resume=place, overwrite=True))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(UsageError, match="would delete the weights of init_from"):
        start(accelerator, WithWeights(str(tmp_path / "link"), overwrite=True, init_from=str(path)))
    assert commit.verify(path).step == 3


@dataclass(frozen=True)
class WithWeights(Config):
    """A config that may take weights from elsewhere."""

    init_from: str | None = None


def test_the_weights_to_begin_from_are_not_asked_for_later(accelerator: Accelerator, tmp_path: Path) -> None:
    source = make(tmp_path / "other" / "checkpoints", 9)
    config = WithWeights(str(tmp_path / "run"), init_from=str(source))
    run = start(accelerator, config)
    assert run.initial_weights == source
    shutil.rmtree(source)
    with pytest.raises(UsageError, match="does not exist"):
        start(accelerator, config)
    make(run.checkpoints, 3)
    again = start(accelerator, config)
    assert (again.start_step, again.initial_weights) == (3, None)


def test_weights_within_the_run_s_own_directory_are_refused_only_if_they_would_be_deleted(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    source = make(tmp_path / "run" / "base", 9)
    config = WithWeights(str(tmp_path / "run"), init_from=str(source))
    assert start(accelerator, config).initial_weights == source
    with pytest.raises(UsageError, match=r"overwrite: true would delete the weights of init_from: .*copy them first"):
        start(accelerator, replace(config, overwrite=True))
    assert (source / "model.safetensors").exists()


def test_an_evaluation_takes_a_checkpoint_without_state(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    run = start(accelerator, config)
    commit.rewrite_manifest(make(run.checkpoints, 3), {"state": False})
    with pytest.raises(CheckpointsUnusableError, match="weights without optimizer state"):
        start(accelerator, config)
    run = open_run(replace(options_of(config), evaluate_only=True), accelerator, "d" * 8)
    run.close()
    assert run.start_step == 3


def test_an_evaluation_on_data_that_the_checkpoint_was_not_trained_on_has_a_folder_of_its_own(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    run = start(accelerator, Config(str(tmp_path)))
    report = tmp_path / "report"
    assert (run.report_directory(), run.report_directory("a")) == (report, report)
    # A loop of one's own may write neither a ledger nor the options.
    path = make(run.checkpoints, 3)
    run.checkpoint = commit.verify(path)
    assert run.report_directory("a") == report
    commit.rewrite_manifest(path, {"experiment": {"data_fingerprint": "a"}})
    run.checkpoint = commit.verify(path)
    assert (run.report_directory("a"), run.report_directory("b")) == (report, report / "other_data")
    (path / "assets").mkdir()
    write_ledger(path / "assets", [Span(0, "a", 5), Span(2, "b", 6)])
    assert (run.report_directory("b"), run.report_directory("a")) == (report, report / "other_data")
    assert run.report_directory() == report


def test_an_evaluation_of_initial_weights_is_asked_for_by_resume_never(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    """And not by a misspelt directory alone. The directory can then be trained in."""
    config = Config(str(tmp_path / "run"), resume="never")
    with pytest.raises(
        UsageError, match=r"contains no run; .* or give --resume never as well, to evaluate the initial"
    ):
        open_run(replace(options_of(config), evaluate_only=True, resume="auto"), accelerator, "d" * 8)
    run = open_run(replace(options_of(config), evaluate_only=True), accelerator, "d" * 8)
    run.close()
    assert (run.start_step, run.checkpoint) == (0, None)
    trained = start(accelerator, config)
    make(trained.checkpoints, 3)
    with pytest.raises(UsageError, match=r"resume: never, but .* is already used"):
        open_run(replace(options_of(config), evaluate_only=True), accelerator, "d" * 8)


def test_the_newest_checkpoint_of_the_run_may_be_named(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    run = start(accelerator, config)
    older, newest = make(run.checkpoints, 3), make(run.checkpoints, 6)
    assert start(accelerator, replace(config, resume=str(newest))).start_step == 6
    with pytest.raises(UsageError, match="already contains a run whose newest checkpoint is checkpoint_00000006"):
        start(accelerator, replace(config, resume=str(older)))


def test_a_run_begun_from_a_step_of_another_goes_on_without_that_run(accelerator: Accelerator, tmp_path: Path) -> None:
    first = start(accelerator, Config(str(tmp_path / "first")))
    source = make(first.checkpoints, 3)
    commit.rewrite_manifest(source, {"experiment": first.saved["experiment"]})
    make(first.checkpoints, 6)
    config = Config(str(tmp_path / "second"), resume=f"{tmp_path / 'first'}@3")
    assert earlier_checkpoints(options_of(config)) == [source]
    second = start(accelerator, config)
    assert second.start_step == 3
    make(second.checkpoints, 9)
    shutil.rmtree(source)
    assert start(accelerator, config).start_step == 9
    here = replace(config, resume=f"{tmp_path / 'second'}@9")
    assert start(accelerator, here).start_step == 9


def test_a_derived_value_is_that_of_a_checkpoint_from_elsewhere(accelerator: Accelerator, tmp_path: Path) -> None:
    first = start(accelerator, Config(str(tmp_path / "first")))
    source = make(first.checkpoints, 3)
    resolved = {"optimizer.decay_steps": 10}
    commit.rewrite_manifest(source, {"experiment": first.saved["experiment"], "resolved": resolved})
    second = start(accelerator, Config(str(tmp_path / "second"), resume=str(source)), decay=20)
    assert second.resolved("optimizer.decay_steps") == 10


def test_a_derived_value_may_be_changed_on_purpose_with_a_checkpoint_from_elsewhere(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    first = start(accelerator, Config(str(tmp_path / "first")))
    source = make(first.checkpoints, 3)
    resolved = {"optimizer.decay_steps": 10}
    commit.rewrite_manifest(source, {"experiment": first.saved["experiment"], "resolved": resolved})
    second = Config(str(tmp_path / "second"), resume=str(source), optimizer=Inner(decay_steps=30))
    with pytest.raises(UsageError, match="decay_steps: 10 there, 30 now"):
        start(accelerator, second)
    second = replace(second, allow=("optimizer.decay_steps",))
    run = start(accelerator, second)
    assert (run.start_step, run.resolved("optimizer.decay_steps")) == (3, 30)
    assert start(accelerator, replace(second, allow=())).resolved("optimizer.decay_steps") == 30


def test_what_an_earlier_start_derived_is_known_before_the_run_is_opened(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    config, derived = Config(str(tmp_path / "run")), {"optimizer.decay_steps": 10}
    assert opening.values_of_first_start(options_of(config)) == {}
    start(accelerator, config, trains=False)
    assert opening.values_of_first_start(options_of(config)) == {}
    first = start(accelerator, config)
    assert opening.values_of_first_start(options_of(config)) == derived
    assert opening.values_of_first_start(replace(config, overwrite=True)) == {}
    source = make(first.checkpoints, step=3)
    commit.rewrite_manifest(source, {"experiment": first.saved["experiment"], "resolved": derived})
    for place in (source, tmp_path / "run"):
        assert opening.values_of_first_start(Config(str(tmp_path / "unused"), resume=str(place))) == derived
    with pytest.raises(UsageError, match="nowhere does not exist"):
        opening.values_of_first_start(Config(str(tmp_path / "unused"), resume=str(tmp_path / "nowhere")))
    assert not (tmp_path / "unused").exists()


def test_resume_policies(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    with pytest.raises(UsageError, match="resume: must"):
        start(accelerator, replace(config, resume="must"))
    run = start(accelerator, config)
    with pytest.raises(UsageError, match="no checkpoint yet"):
        start(accelerator, replace(config, resume="must"))
    make(run.checkpoints, 3)
    with pytest.raises(UsageError, match="resume: never"):
        start(accelerator, replace(config, resume="never"))
    with pytest.raises(UsageError, match="leave one of them out"):
        start(accelerator, replace(config, overwrite=True, resume="must"))
    anew = start(accelerator, replace(config, overwrite=True, seed=5))
    assert anew.checkpoint is None
    assert anew.run_id != run.run_id


def test_checkpoints_that_do_not_verify(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    run = start(accelerator, config)
    make(run.checkpoints, 3)
    bad = make(run.checkpoints, 5)
    (bad / "model.safetensors").write_bytes(b"")
    fallen_back = start(accelerator, config)
    assert fallen_back.start_step == 3
    assert "checkpoint_00000005" in fallen_back.decision
    (run.checkpoints / "checkpoint_00000003" / "manifest.json").unlink()
    with pytest.raises(CheckpointsUnusableError, match="refusing to restart from step 0"):
        start(accelerator, config)


HOLD = """
import sys
from pathlib import Path
from accel_train.store import lock as locks
lock = locks.acquire(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_use_one_directory(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    start(accelerator, config)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(UsageError, match=f"in use by process {other.pid}"):
            start(accelerator, config)


def test_a_directory_that_this_process_still_holds_says_how_to_release_it(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    config = Config(str(tmp_path / "run"))
    first = open_run(options_of(config), accelerator, "d" * 8, {"optimizer.decay_steps": 10})
    held = rf"earlier run of this process \(process {os.getpid()} .*contextlib\.closing\(run\)"
    with closing(first), pytest.raises(UsageError, match=held):
        start(accelerator, config)
    start(accelerator, config)


@pytest.mark.parametrize("value", [float("inf"), {"lr": torch.ones(2)}, Path("data")])
def test_a_value_that_run_json_cannot_hold_is_named(value: object) -> None:
    with pytest.raises(UsageError, match=r"experiment: f: .* cannot be written to run\.json .*: finite numbers, text"):
        RunOptions("run", {"seed": 0, "f": value})


def test_directories_that_cannot_be_used(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        start(accelerator, Config(str(tmp_path / "file")))
    run = start(accelerator, Config(str(tmp_path / "with space é")))
    saved = json.loads((run.directory / "run.json").read_text())
    saved["schema"] = 99
    (run.directory / "run.json").write_text(json.dumps(saved))
    with pytest.raises(UsageError, match="schema 99"):
        start(accelerator, Config(str(run.directory)))


@pytest.mark.fault(
    "R2", injected="checkpoints/ a dangling link (a disk that is not mounted)", outcome="exit 2, saying so"
)
def test_a_disk_that_is_not_mounted(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    run = start(accelerator, config)
    make(run.checkpoints, 3)
    run.checkpoints.rename(tmp_path / "disk")
    run.checkpoints.symlink_to(tmp_path / "disk")
    assert start(accelerator, config).start_step == 3
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    for resume in ("auto", "must", "never"):
        with pytest.raises(UsageError, match=r"checkpoints is a link to .*/disk, which does not exist .*not mounted"):
            start(accelerator, replace(config, resume=resume))
    with pytest.raises(UsageError, match="not mounted"):
        find_place(tmp_path / "run")
    assert run.checkpoints.is_symlink()


@pytest.mark.fault(
    "R2", injected="a checkpoint that is a dangling link (a disk that is not mounted)", outcome="exit 2, saying so"
)
def test_a_checkpoint_on_a_disk_that_is_not_mounted(accelerator: Accelerator, tmp_path: Path) -> None:
    config = Config(str(tmp_path / "run"))
    run = start(accelerator, config)
    make(run.checkpoints, 3)
    (run.checkpoints / "checkpoint_00000005").symlink_to(tmp_path / "disk")
    again = replace(config, output_dir=str(tmp_path / "again"), resume=str(run.directory))
    for options in (config, replace(config, overwrite=True), again):
        with pytest.raises(UsageError, match=r": .*checkpoint_00000005 is a link to .*/disk, which .*not mounted"):
            start(accelerator, options)
    with pytest.raises(UsageError, match=r"init_from: .*not mounted"):
        find_weights(str(run.directory))
    for place in (run.directory, run.checkpoints):
        with pytest.raises(UsageError, match="not mounted"):
            find_place(place)
    # As after a first start without checkpoints that had no step yet.
    shutil.rmtree(run.checkpoints / "checkpoint_00000003")
    with pytest.raises(UsageError, match="not mounted"):
        start(accelerator, config)


@pytest.mark.fault(
    "R2",
    injected="the newest checkpoint cannot be read at a start (ESTALE)",
    outcome="exit 2, saying so; it stays, and nothing goes back behind it",
)
def test_a_checkpoint_that_cannot_be_read_at_a_start_stops_it(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(str(tmp_path / "run"))
    run = start(accelerator, config)
    make(run.checkpoints, 3)
    newest = make(run.checkpoints, 5)
    again = replace(config, output_dir=str(tmp_path / "again"), resume=str(run.directory))
    with monkeypatch.context() as patch:
        lost(newest / "model.safetensors", patch, errno.ESTALE)
        for options in (config, again):
            with pytest.raises(
                UsageError, match=r": .*00000005: model\.safetensors cannot be read now: Stale.*; it may"
            ):
                start(accelerator, options)
        with pytest.raises(UsageError, match=r"init_from: .*cannot be read now"):
            find_weights(str(run.directory))
    with monkeypatch.context() as patch:
        lost(newest, patch, errno.ESTALE)
        patch.setattr(os, "open", failing_below(newest, os.open))
        with pytest.raises(UsageError, match=r"00000005: manifest\.json cannot be read now: Stale"):
            start(accelerator, config)
    assert start(accelerator, config).start_step == 5


def failing_below(folder: Path, call: Callable[..., int]) -> Callable[..., int]:
    def fail(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith(f"{folder}/"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return call(path, *args, **options)

    return fail


def test_a_file_system_without_locks_is_a_warning_and_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    locks.acquire(tmp_path).close()
    assert "its file system does not support locks" in caplog.text


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a refused start removes its own: else two processes could hold the lock of one directory."""
    flock = fcntl.flock

    def removed_meanwhile(*args: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / ".lock").unlink()
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    lock = locks.acquire(tmp_path)
    with pytest.raises(locks.LockedError, match=f"process {os.getpid()} on "):
        locks.acquire(tmp_path)
    lock.close()


def test_only_a_process_that_failed_leaves_its_name_in_the_lock(tmp_path: Path) -> None:
    """By that name ``accel-train monitor`` knows a killed run."""
    file = tmp_path / ".lock"
    for error in (None, UsageError):
        held = locks.acquire(tmp_path, " (of a purpose)")
        assert file.read_text().endswith(" (of a purpose)\n")
        held.release(error)
        assert file.read_text() == ""
    locks.acquire(tmp_path).release(RuntimeError)
    failed = file.read_text()
    assert failed == f"process {os.getpid()} on {os.uname().nodename}\n"
    os.utime(file, (1e9, 1e9))
    # A later one that ends well has not ended the run that failed.
    locks.acquire(tmp_path, " (of a purpose)").release()
    assert (file.read_text(), file.stat().st_mtime) == (failed, 1e9)


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_a_run_that_ends_well_names_no_process(
    accelerator: Accelerator, tmp_path: Path, error: type[Exception] | None
) -> None:
    run = open_run(options_of(Config(str(tmp_path / "run"))), accelerator, "d" * 8, {"optimizer.decay_steps": 10})
    run.note_training()
    run.close(error)
    assert ((run.directory / ".lock").read_text() == "") == (error is None)
    # A refused start leaves it as it was.
    before = (run.directory / ".lock").read_text()
    with pytest.raises(UsageError, match="resume: never"):
        start(accelerator, Config(str(tmp_path / "run"), resume="never"))
    assert (run.directory / ".lock").read_text() == before


def test_a_lock_that_cannot_be_written_is_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    """As that of another user is; a directory in its place stands for it, because root may write anything."""
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"cannot be locked: .*\.lock"):
        start(accelerator, Config(str(tmp_path / "run")))
