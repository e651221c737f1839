"""Rules about saves, retention, restarts and pushes."""

from __future__ import annotations

import math

from accel_train.linting.facts import Facts
from accel_train.linting.findings import Finding, Rule

MANY_SAVES = 1000
MANY_REVISIONS = 200
TORCHRUN_GRACE_SECONDS = 30
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
RESTARTED = "SLURM_RESTART_COUNT"
GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def _save_every(facts: Facts) -> int:
    return int(facts.number("checkpoints.save_every"))


def _saves(facts: Facts) -> int:
    """Return the number of saves by steps over the whole run, 0 if it is unknown or saves are by the clock."""
    every = _save_every(facts)
    if not every or facts.steps is None:
        return 0
    # Saves by the interval only, without the one at the end of the run.
    return facts.steps // every


def _round_steps(steps: int) -> int:
    """Round to one digit: 1234 to 1000."""
    # A person reads and types the number, so a round one is better than an exact one.
    power = 10 ** (len(str(max(1, steps))) - 1)
    return max(1, steps // power * power)


def no_save_before_the_end(facts: Facts) -> Finding | None:
    """With `save_every`, saves by the clock are off. If the interval is longer than the run, it saves at its end only,
    and a crash loses everything.
    """
    every = _save_every(facts)
    other = facts.number("checkpoints.save_every_minutes") or facts.number("checkpoints.save_every_epochs")
    if facts.steps is None or facts.is_trial or other or every <= facts.steps:
        return None
    # Ten saves over the run.
    better = _round_steps(facts.steps // 10)
    return Finding(
        option="checkpoints.save_every",
        value=every,
        reason=f"the run has {facts.steps} steps, so a crash in the last one loses all of them",
        remedy=f"give {better}, or leave it out: then a save is due every 10 minutes",
        change=("checkpoints.save_every", better),
    )


def no_epoch_before_the_end(facts: Facts) -> Finding | None:
    """With `save_every_epochs`, saves by the clock are off. If the interval is longer than the run, it saves at its end
    only, and a crash loses everything.
    """
    every = facts.number("checkpoints.save_every_epochs")
    other = facts.number("checkpoints.save_every_minutes") or 0 < _save_every(facts) <= (facts.steps or 0)
    if facts.steps is None or not facts.dataset_size or facts.is_trial or other:
        return None
    epochs = facts.steps * facts.samples_per_step / facts.dataset_size
    if every <= epochs:
        return None
    return Finding(
        option="checkpoints.save_every_epochs",
        value=every,
        reason=f"the run has {epochs:.3g} epochs, so a crash in the last step loses all of them",
        remedy=f"give {epochs / 10:.2g}, or leave it out: then a save is due every 10 minutes",
    )


def many_saves(facts: Facts) -> Finding | None:
    """Each save copies weights, EMA and optimizer state from the device, and waits for the write of the one before."""
    count = _saves(facts)
    if count <= MANY_SAVES:
        return None
    # A hundred saves over the run.
    better = _round_steps((facts.steps or 0) // 100)
    return Finding(
        option="checkpoints.save_every",
        value=_save_every(facts),
        reason=f"the run saves {count} times, and each save waits for the one before",
        remedy=f"give {better}, or save by the clock with checkpoints.save_every_minutes",
        change=("checkpoints.save_every", better),
    )


def waiting_saves(facts: Facts) -> Finding | None:
    """With `asynchronous: false` the training loop waits until a checkpoint is written and flushed."""
    count = _saves(facts)
    if facts.option("checkpoints.asynchronous") is not False or facts.is_trial or count < 10:
        return None
    return Finding(
        option="checkpoints.asynchronous",
        value=False,
        reason=f"the loop waits for the disk {count} times",
        remedy="leave it on, unless host memory has no room for a snapshot",
        change=("checkpoints.asynchronous", True),
    )


def one_checkpoint(facts: Facts) -> Finding | None:
    """A run that goes wrong is often noticed some saves later. With only one checkpoint there is none from before, and
    none to fall back to if a disk damages it.
    """
    others = ("keep_best", "keep_every", "keep_window_steps", "keep_window_epochs")
    if facts.option("checkpoints.keep_last") != 1 or facts.is_trial:
        return None
    if any(facts.number(f"checkpoints.{name}") for name in others):
        return None
    return Finding(
        option="checkpoints.keep_last",
        value=1,
        reason="after the next save no checkpoint from before a spike or a damaged file is left to return to",
        remedy="keep 2 or more; checkpoints.keep_state_last can delete old optimizer states",
        change=("checkpoints.keep_last", 3),
    )


def every_checkpoint(facts: Facts) -> Finding | None:
    """`keep_last: 0` deletes nothing, and a checkpoint with optimizer state takes 12 to 16 bytes per parameter."""
    count = _saves(facts)
    if facts.option("checkpoints.keep_last") != 0 or count < 100:
        return None
    apart = _round_steps((facts.steps or 0) // 20)
    return Finding(
        option="checkpoints.keep_last",
        value=0,
        reason=f"{count} checkpoints with optimizer state stay on the disk",
        remedy=f"keep the last 3, and one every {apart} steps for good with checkpoints.keep_every",
    )


def keep_every_between_saves(facts: Facts) -> Finding | None:
    """`keep_every` keeps checkpoints whose step is a multiple of it. It does not cause saves, so it should be a
    multiple of `save_every`.
    """
    keep = int(facts.number("checkpoints.keep_every"))
    save = _save_every(facts)
    if not keep or not save or keep % save == 0:
        return None
    # At least one interval: a keep_every below save_every would round to 0.
    nearest = max(1, round(keep / save)) * save
    return Finding(
        option="checkpoints.keep_every",
        value=keep,
        reason=f"saves happen every {save} steps, so the first one to be kept is at step {math.lcm(keep, save)}",
        remedy=f"give a multiple of {save}, such as {nearest}",
    )


def empty_window(facts: Facts) -> Finding | None:
    """`keep_window_steps` keeps the checkpoints of the last steps. A window shorter than the interval between saves
    holds at most the newest one, which is kept anyway.
    """
    window = int(facts.number("checkpoints.keep_window_steps"))
    save = _save_every(facts)
    if not window or not save or window >= save:
        return None
    return Finding(
        option="checkpoints.keep_window_steps",
        value=window,
        reason=f"saves happen every {save} steps, so the window contains no checkpoint but the newest",
        remedy=f"give {3 * save} or more, or leave it out",
        change=("checkpoints.keep_window_steps", 3 * save),
    )


def _wants_best(facts: Facts) -> bool:
    pushes_best = facts.option("hub.repo_id") is not None and facts.option("hub.push") == "best"
    return bool(facts.number("checkpoints.keep_best")) or pushes_best


def best_of_one(facts: Facts) -> Finding | None:
    """The best checkpoint is chosen by evaluations. With `evaluation.every: 0` there is one, at the end."""
    if not _wants_best(facts) or facts.option("evaluation.every") != 0:
        return None
    every = _save_every(facts)
    return Finding(
        option="evaluation.every",
        value=0,
        reason="the only evaluation is at the end, so the best checkpoint is the last one",
        remedy="evaluate where checkpoints are saved",
        change=("evaluation.every", every) if every else None,
    )


def best_between_saves(facts: Facts) -> Finding | None:
    """The metrics of an evaluation belong to the checkpoint of the same step. An evaluation at a step without a save
    selects no checkpoint.
    """
    save = _save_every(facts)
    evaluate = int(facts.number("evaluation.every"))
    if not _wants_best(facts) or not save or not evaluate or evaluate % save == 0:
        return None
    meeting = math.lcm(save, evaluate) // evaluate
    return Finding(
        option="evaluation.every",
        value=evaluate,
        reason=f"only one of every {meeting} evaluations has a checkpoint, so the best may not be kept",
        remedy=f"set evaluation.every to a multiple of checkpoints.save_every ({save})",
        change=("evaluation.every", max(1, round(evaluate / save)) * save),
    )


def _restarts(facts: Facts) -> str | None:
    """Return the name of the variable by which a launcher shows its restarts, None without restarts."""
    # torchrun sets its variable to 0 if it does not restart.
    for name in (MAX_RESTARTS, RESTARTED):
        if facts.variable(name) not in ("", "0"):
            return name
    return None


def overwrite_with_restarts(facts: Facts) -> Finding | None:
    """A restart by torchrun or a requeue by SLURM repeats the same command line. With --overwrite it deletes what it
    should continue from.
    """
    name = _restarts(facts)
    if name is None or not facts.option("overwrite"):
        return None
    return Finding(
        option="overwrite",
        value=True,
        reason=f"{name}={facts.environment[name]}: every restart deletes the checkpoints and begins at step 0",
        remedy="leave --overwrite out, and delete the directory by hand if you mean to",
    )


def no_resume_with_restarts(facts: Facts) -> Finding | None:
    """With `resume: never` a used directory is refused, and a restart finds one."""
    name = _restarts(facts)
    if name is None or facts.option("resume") != "never":
        return None
    return Finding(
        option="resume",
        value="never",
        reason=f"{name}={facts.environment[name]}: a restart finds the earlier run in the directory, and is refused",
        remedy="leave it at auto",
    )


def grace_above_torchrun(facts: Facts) -> Finding | None:
    """torchrun kills its processes 30 s after it has forwarded a signal, whatever the scheduler grants."""
    grace = facts.number("checkpoints.grace_seconds")
    # Set by torchrun for its processes. Under another launcher only the scheduler's limit counts.
    if "TORCHELASTIC_RUN_ID" not in facts.environment:
        return None
    given = facts.variable(GRACE)
    # Anything but a whole number is left to torchrun to judge.
    allowed = int(given) if given.isdigit() else TORCHRUN_GRACE_SECONDS
    if grace <= allowed:
        return None
    return Finding(
        option="checkpoints.grace_seconds",
        value=facts.option("checkpoints.grace_seconds"),
        reason=f"torchrun kills the processes {allowed} s after a signal, in the middle of a save that takes longer",
        remedy=f"set {GRACE}={math.ceil(grace)} for the launcher",
    )


def many_revisions(facts: Facts) -> Finding | None:
    """Each pushed step is a branch or a tag of the repository, which nobody deletes."""
    count = _saves(facts) // max(1, int(facts.number("hub.push_every")))
    if facts.option("hub.repo_id") is None or facts.option("hub.push") != "every" or count <= MANY_REVISIONS:
        return None
    # 50 revisions over the run, well below `MANY_REVISIONS`.
    better = math.ceil(_saves(facts) / 50)
    return Finding(
        option="hub.push_every",
        value=facts.option("hub.push_every"),
        reason=f"the repository gets {count} {facts.option('hub.revisions')} revisions, each with all weights",
        remedy=f"push one checkpoint in {better}",
        change=("hub.push_every", better),
    )


def public_without_license(facts: Facts) -> Finding | None:
    """Weights without a licence may be viewed but not used."""
    if facts.option("hub.repo_id") is None or facts.option("hub.private") is not False:
        return None
    if facts.option("hub.license") is not None:
        return None
    return Finding(
        option="hub.license",
        value=None,
        reason=f"{facts.option('hub.repo_id')} is public, but its card gives nobody permission to use it",
        remedy="name a licence, such as --hub.license apache-2.0; respect those of the base and of the data",
    )


def weights_alone_of_a_long_run(facts: Facts) -> Finding | None:
    """Without optimizer state no checkpoint can be resumed from, so a preemption ends the run for good."""
    if facts.option("checkpoints.save_state") is not False or _restarts(facts) is None:
        return None
    return Finding(
        option="checkpoints.save_state",
        value=False,
        reason="this job is restarted by its launcher, and no checkpoint has the state to continue from",
        remedy="save the state; checkpoints.keep_state_last: 1 deletes that of older checkpoints",
        change=("checkpoints.save_state", True),
    )


PAGE = "docs/checkpoints.md"
RELIABILITY = "docs/reliability.md"
SAVING_RULES = (
    Rule("no-save-before-the-end", "warning", PAGE, no_save_before_the_end),
    Rule("no-epoch-before-the-end", "warning", PAGE, no_epoch_before_the_end, "data"),
    Rule("many-saves", "warning", "docs/performance.md", many_saves),
    Rule("waiting-saves", "warning", "accelerate#4099", waiting_saves),
    Rule("one-checkpoint", "warning", PAGE, one_checkpoint),
    Rule("every-checkpoint-kept", "warning", PAGE, every_checkpoint),
    Rule("keep-every-between-saves", "warning", PAGE, keep_every_between_saves),
    Rule("empty-window", "warning", PAGE, empty_window),
    Rule("best-of-one-evaluation", "warning", PAGE, best_of_one),
    Rule("best-between-saves", "warning", PAGE, best_between_saves),
    Rule("overwrite-with-restarts", "error", RELIABILITY, overwrite_with_restarts),
    Rule("no-resume-with-restarts", "error", RELIABILITY, no_resume_with_restarts),
    Rule("state-missing-for-restarts", "error", RELIABILITY, weights_alone_of_a_long_run),
    Rule("grace-above-torchrun", "warning", "docs/machines.md", grace_above_torchrun),
    Rule("many-revisions", "warning", PAGE, many_revisions),
    Rule("public-without-license", "warning", "Hub: licenses", public_without_license),
)
