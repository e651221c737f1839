"""The table of all rules, and the selection of rules to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from accel_train.config import UsageError
from accel_train.linting.facts import Facts
from accel_train.linting.findings import Finding, Rule, Stage
from accel_train.linting.limits import LIMIT_RULES
from accel_train.linting.network import NETWORK_RULES
from accel_train.linting.processes import PROCESS_RULES
from accel_train.linting.saving import SAVING_RULES
from accel_train.linting.training import TRAINING_RULES
from accel_train.linting.variables import VARIABLE_RULES
from accel_train.wording import did_you_mean, nearest

SUBJECTS = {
    "Processes and sharding": PROCESS_RULES,
    "Network": NETWORK_RULES,
    "Environment variables": VARIABLE_RULES,
    "Host": LIMIT_RULES,
    "Saving and pushing": SAVING_RULES,
    "Training": TRAINING_RULES,
}
# By name, because findings, --ignore and --explain name rules.
RULES: dict[str, Rule] = {rule.name: rule for rules in SUBJECTS.values() for rule in rules}
STAGES: tuple[Stage, ...] = ("start", "data", "model")
IGNORE_VARIABLE = "ACCEL_TRAIN_IGNORE"
"""Names of rules to silence, separated by commas."""


class Found(NamedTuple):
    """A finding, with its rule."""

    rule: Rule
    finding: Finding


def lint(facts: Facts, ignored: Iterable[str] = (), stages: Iterable[Stage] = STAGES) -> list[Found]:
    """Return the findings, errors first. Takes about a millisecond."""
    silent = set(ignored)
    wanted = set(stages)
    findings: list[Found] = []
    for rule in RULES.values():
        if rule.name in silent or rule.stage not in wanted:
            continue
        finding = rule.find(facts)
        if finding is not None:
            findings.append(Found(rule, finding))
    # Sorting is stable: rules of a subject stay together.
    return sorted(findings, key=lambda item: item.rule.severity != "error")


def ignored_names(environment: Mapping[str, str], more: Iterable[str] = ()) -> list[str]:
    """Return the names of the silenced rules. Raises ``UsageError`` for an unknown name."""
    named = environment.get(IGNORE_VARIABLE, "").split(",")
    given = [name.strip() for name in named if name.strip()]
    # Through `find_rule`, which refuses an unknown name.
    return [find_rule(name).name for name in (*given, *more)]


def find_rule(name: str) -> Rule:
    """Return the rule of a name. Raises ``UsageError`` for an unknown name."""
    if name in RULES:
        return RULES[name]
    raise UsageError(
        f"rule {name!r}: there is no such rule{did_you_mean(nearest(name, RULES))}; docs/linting.md lists all "
        f"{len(RULES)}; correct the name in --ignore, --explain or {IGNORE_VARIABLE}"
    )
