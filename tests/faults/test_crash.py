"""Processes killed at every place of a save, and at random: nothing acknowledged is lost, nothing torn is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import Zygote, acknowledged, checkpoints, debris, digests, first_difference, losses

EVERY = ("--checkpoints.save_every", "5", "--checkpoints.keep_last", "2")


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert zygote.run(out, *EVERY).wait() == [0]
    return out


def survives(zygote: Zygote, out: Path, whole: Path, *arguments: str, failpoint: str, expect: int) -> None:
    """Kill at ``failpoint`` during the save of step 10, look, start again, compare with the whole run."""
    ended = zygote.run(out, *EVERY, *arguments, failpoint=failpoint)
    assert ended.wait() == [-9], ended.output()
    kept = acknowledged(out)
    assert kept in ([5], [5, 10])
    assert expect in checkpoints(out)
    assert set(kept) <= set(checkpoints(out)), "an acknowledged checkpoint is gone"
    again = zygote.run(out, *EVERY, *arguments)
    assert again.wait() == [0], again.output()
    assert f"at step {expect}" in again.output()
    assert debris(out) == []
    assert checkpoints(out) == [15, 20]
    assert losses(out) == losses(whole)
    a, b = (digests(run / "checkpoints" / "checkpoint_00000020") for run in (out, whole))
    assert first_difference(a, b) is None


@pytest.mark.fault("F1", injected="SIGKILL after the temporary directory is made", outcome="previous checkpoint used")
@pytest.mark.parametrize("mode", ["true", "false"])
def test_killed_after_mkdir(zygote: Zygote, out: Path, whole: Path, mode: str) -> None:
    survives(zygote, out, whole, "--checkpoints.asynchronous", mode, failpoint="after_mkdir#2", expect=5)
