"""Printed lines and receipt of a comparison of two environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accel_train.commands import diff
from accel_train.precision import relative
from accel_train.rerun import agreement, recorded
from accel_train.rerun.agreement import Sides
from accel_train.rerun.receipt import Result
from accel_train.rerun.starts import Start
from accel_train.rerun.upgrade import environment
from accel_train.rerun.upgrade.environment import Environment
from accel_train.rerun.upgrade.traces import Difference, Record, Recorded
from accel_train.wording import shortened

if TYPE_CHECKING:
    from accel_train.rerun.samples.again import Beginning
    from accel_train.rerun.upgrade.upgrade import Side, Trained

NAMES: Sides = ("here", "upgraded")
MOST_OPERATORS = 8
"""Most operators of a sequence that are shown."""


@dataclass(frozen=True)
class Located:
    """The first difference: its step, terms and operator."""

    step: int
    """Step as in log lines. If the weights differed before any step, that of the beginning."""
    terms: Sequence[str]
    """Fields of the log line and parts of the state after the step."""
    kind: str | None = None
    """Kind of a ``traces.Difference``. None if no operator is named."""
    here: Sequence[Record] = ()
    there: Sequence[Record] = ()
    position: int | None = None
    """Position of the first operator in the recording here, counted from 0."""
    recorded: tuple[int, int] | None = None
    """Number of recorded operators on each side."""
    largest: str | None = None
    """Largest difference of the outputs."""
    relative: float | None = None
    """Norm of the difference of the outputs, relative to that here."""
    notes: Sequence[str] = field(default_factory=list[str])

    def because(self, note: str) -> Located:
        """Return the same with one more note."""
        return replace(self, notes=[*self.notes, note])


@dataclass(frozen=True)
class Comparison:
    """Result of a window in two environments."""

    environments: Sequence[Environment]
    starts: Mapping[str, Sequence[Start]]
    result: Result
    located: Located | None
    """None if nothing differs."""
    as_recorded: int | None
    """First logged step that differs here from the run itself, 0 for none. None without a logged step."""


def unequal(a: Mapping[str, int], b: Mapping[str, int]) -> list[str]:
    """Name the parts of the state that differ in any bit."""
    return [name for name in a if a[name] != b.get(name)]


def head(sides: Sequence[Side], beginning: Beginning, first: int, last: int) -> list[str]:
    """Describe the run, the two environments and the steps."""
    run = beginning.run
    lines = [f"run {run.run_id}: {run.directory}"]
    lines += [f"{side.name}: {side.environment.interpreter}" for side in sides]
    lines.append(f"versions: {_versions(sides[0].environment, sides[1].environment)}")
    recipe = recorded.name_of(beginning.recipe)
    lines.append(f"trained in both: steps {beginning.step + 1} to {last}, from {beginning}, with recipe {recipe}")
    if beginning.step < first:
        lines.append(f"no checkpoint of step {first}: steps up to there are trained to reach it, and compared as well")
    return lines


def _versions(here: Environment, there: Environment) -> str:
    # Hundreds of packages may differ, and few of them compute anything.
    differing = environment.differing_versions(here, there)
    known = [name for name in differing if name in environment.WITH_EFFECT]
    texts = [f"{name} {differing[name][0] or 'absent'} -> {differing[name][1] or 'absent'}" for name in known]
    others = len(differing) - len(known)
    if others:
        texts.append(f"{others} other package(s), listed in the receipt")
    return ", ".join(texts) or "the same packages in both"


def locate(located: Located, found: Difference | None, sides: Sequence[Side], trained: Sequence[Trained]) -> Located:
    """Add the operator of a difference, with its outputs if they were kept."""
    here, there = (side.recorded() for side in sides)
    located = replace(located, recorded=(len(here.trace), len(there.trace)))
    located = _with_notes(located, found, (here, there), sides, trained)
    if found is None:
        return located
    located = replace(
        located,
        kind=found.kind,
        here=here.trace[slice(*found.here)],
        there=there.trace[slice(*found.there)],
        position=found.here[0],
    )
    a, b = (side.kept for side in sides)
    if found.kind != "output" or a is None or b is None:
        return located
    (ours,) = diff.collections_of(a).values()
    (theirs,) = diff.collections_of(b).values()
    compared = diff.compare(ours, theirs)
    largest = None if compared.largest is None else f"output {compared.largest}"
    return replace(located, largest=largest, relative=compared.relative)


def _with_notes(
    located: Located,
    found: Difference | None,
    recordings: Sequence[Recorded],
    sides: Sequence[Side],
    trained: Sequence[Trained],
) -> Located:
    for side, one, recording in zip(sides, trained, recordings, strict=True):
        # A recording runs eagerly, so the recorded step is compared with the one that was trained before.
        wanted = {located.step: one.run.lines("train")[located.step]}
        (row,) = agreement.rows_of(wanted, {located.step: side.line})
        if row.differing:
            located = located.because(
                f"{side.name}, the recorded step has different bits than before ({', '.join(row.differing)}): compiled "
                "code runs eagerly while it is recorded, or kernels add in no fixed order"
            )
        if found is None and recording.unstable:
            # The first one: what follows may only pass its difference on.
            _, position, _ = min(recording.unstable, key=lambda value: value[1])
            operator = recording.trace[position]["operator"]
            located = located.because(
                f"{side.name}, two recordings of the step differ from {operator} on, so its results cannot tell the "
                "environments apart"
            )
    if found is None:
        located = located.because("no recorded operator has different outputs for equal inputs")
    return located


def lines(found: Comparison) -> list[str]:
    """Return the table, the first difference and the verdict."""
    result = found.result
    printed = agreement.table(result.rows, result.weights, NAMES)
    if found.as_recorded is not None:
        same = "the logged bits" if found.as_recorded == 0 else f"different bits from step {found.as_recorded} on"
        printed.append(f"here, compared with what the run logged: {same}")
    if found.located is not None:
        printed += _located_lines(found.located, result)
    if result.reasons:
        printed += agreement.allowed_lines(result.reasons, result.tolerance)
    else:
        printed.append("the same layout, machine and versions in both: every bit must be the same")
    return [*printed, f"verdict: {result.verdict}"]


def _located_lines(located: Located, result: Result) -> list[str]:
    if located.step == result.start_step:
        return [f"first difference: before the first step ({', '.join(located.terms)}): the initial values differ"]
    printed = [f"first differing step: {located.step} ({', '.join(located.terms)})"]
    row = result.first_difference
    if row is not None:
        # A difference of the last bits may take some steps to show in a loss.
        if row.step != located.step:
            printed.append(
                f"first step with a different loss or gradient norm: {row.step} ({', '.join(row.differing)})"
            )
        width = max(map(len, row.differing))
        for name in row.differing:
            a, b = row.values[name]
            distance = relative(a, b)
            printed.append(f"  {name:<{width}}  {a.hex():>22}  {b.hex():>22}  relative {distance:.3g}")
    printed += _operator_lines(located)
    return [*printed, *(f"note: {note}" for note in located.notes)]


def _operator_lines(located: Located) -> list[str]:
    if located.kind is None or located.recorded is None:
        return []
    if located.kind == "operators":
        return [
            "first difference of operators: different operators are called, with a different result",
            f"  here: {_sequence(located.here)}",
            f"  upgraded: {_sequence(located.there)}",
            *_place((*located.here, *located.there)[0]),
        ]
    operator, other = located.here[0], located.there[0]
    name = operator["operator"]
    if located.kind == "inputs":
        first = f"first operator with different inputs that no operator of this step has computed: {name}"
        return [first, *_place(operator)]
    if located.kind == "arguments":
        names = [key for key, value in operator["arguments"].items() if value != other["arguments"].get(key)]
        changed = [f"{key} {operator['arguments'][key]} -> {other['arguments'].get(key)}" for key in names]
        return [f"first operator with different arguments: {name} ({', '.join(changed)})", *_place(operator)]
    printed = [f"first operator with a different output for equal inputs: {name}", *_place(operator)]
    printed.append(f"  inputs {_shapes(operator['inputs'])}; outputs {_shapes(operator['outputs'])}")
    if located.largest is not None:
        printed.append(f"  largest difference, A here, B upgraded: {located.largest}")
        printed.append(f"  norm of the difference: {located.relative:.3g} of that of the output")
    count, _ = located.recorded
    printed.append(f"  operator {1 + (located.position or 0)} of {count} in the step")
    return printed


def _place(operator: Record) -> list[str]:
    where = f"module {operator['module']}" if operator["module"] else "outside of the model's modules"
    if operator["backward"]:
        where = f"in the backward ({operator['backward']}) of {where}"
    caller = operator["caller"]
    return [f"  {where}, {caller}" if caller else f"  {where}"]


def _shapes(values: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(value["tensor"] for value in values) or "none"


def _sequence(operators: Sequence[Record]) -> str:
    return shortened([str(one["operator"]) for one in operators], MOST_OPERATORS)


def as_json(found: Comparison) -> dict[str, Any]:
    """Return the fields that a receipt of two environments has besides those of a replay."""
    here, there = found.environments
    located = found.located
    return {
        "packages": dict(zip(NAMES, map(environment.describe, found.environments), strict=True)),
        "differing_versions": {k: list(v) for k, v in environment.differing_versions(here, there).items()},
        "first_differing_step": None if located is None else located.step,
        "first_difference": None if located is None else asdict(located),
        "first_step_other_than_logged": found.as_recorded,
    }
