"""Checks of a verification: the runs that each needs, and its finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accel_train.data.sampler import accumulation_steps
from accel_train.precision import nan_as_infinite
from accel_train.verification.comparing import Difference, bit_for_bit, within_rounding
from accel_train.verification.facts import Outcome
from accel_train.verification.plan import REFERENCE, Sizes
from accel_train.wording import shortened

Verdict = Literal["ok", "FAILED", "not checked"]
# As for logged norms. Correct recipes show about 3e-6 (docs/verify.md).
NORM_TOLERANCE = 1e-4
"""Largest relative difference of a clipped norm that rounding explains."""
# A whole reduction too many adds 1, far above this.
SHARE_TOLERANCE = 0.01
"""Difference of the values reduced in a step, as a multiple of the number of parameters."""
NAMES_SHOWN = 6


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    verdict: Verdict
    largest: str = ""
    """Largest difference, with its quantity."""
    tolerance: str = ""
    reason: str = ""
    """Reason for the verdict. Empty for ``ok``, unless there is something to add."""
    crashed: bool = False
    """A run ended with an error, which explains itself."""


@dataclass(frozen=True)
class Evidence:
    """Input of the checks."""

    outcomes: Mapping[str, Outcome]
    absent: Mapping[str, str]
    """Skipped run -> the reason."""
    sizes: Sizes
    options: Mapping[str, Any]
    """Options of the recipe, as resolved with the user's flags."""
    max_grad_norm: float
    """Value used in the runs, possibly lower than the config's."""


CALLS = ("window.", "training.")
"""Beginnings of refusals of the loop's own calls."""


@dataclass(frozen=True)
class Check:
    """A check by its name, the runs it needs beside the reference, and the meaning of its failure."""

    name: str
    title: str
    runs: tuple[str, ...]
    find: Callable[[Evidence], Finding]
    failure: str


def missing(evidence: Evidence, names: Sequence[str]) -> Finding | None:
    """Return the finding for skipped or failed runs, or None if all are there."""
    for name in (REFERENCE, *names):
        if name in evidence.absent:
            return Finding("not checked", reason=evidence.absent[name])
        outcome = evidence.outcomes[name]
        # A refusal, such as options that exclude a strategy, says nothing about the gradient.
        if outcome.code == 2:
            reason = f"refused: {outcome.message}"
            # Unless it is of the loop itself, such as a loss of samples without weight.
            verdict = "FAILED" if outcome.message.startswith(CALLS) else "not checked"
            return Finding(verdict, reason=reason, crashed=verdict == "FAILED")
        if outcome.failed:
            said = f"the run {name} ended with exit code {outcome.code}:\n{outcome.message}"
            return Finding("FAILED", reason=said, crashed=True)
        unobserved = _unobserved(outcome, name, evidence.sizes)
        if unobserved is not None:
            return unobserved
    return None


def _unobserved(outcome: Outcome, name: str, sizes: Sizes) -> Finding | None:
    """Return the finding for a run that did not make the requested steps, and therefore proves nothing."""
    expected = sizes.steps
    # A resume that begins again would have all of them, and the bits of the reference.
    if name == "resumed":
        expected -= sizes.middle
    made = len(outcome.facts.learning_rates)
    logged = len(outcome.losses)
    if made == logged == expected:
        return None
    said = f"the run {name} made {made} steps of loop.training and logged {logged}; {expected} were asked for"
    return Finding("FAILED", reason=said)


def _decided(differences: Sequence[Difference]) -> Finding:
    """Return the finding of a comparison, with the difference that is largest relative to its tolerance."""
    # A NaN exceeds every tolerance but has no order, so `exceeds` is compared first.
    worst = max(differences, key=lambda d: (d.exceeds, d.value / (d.tolerance or 1.0)))
    exceeding = [str(d) for d in differences if d.exceeds]
    tolerance = f"{worst.tolerance:.0e}" if worst.tolerance else "0 (every bit)"
    verdict = "FAILED" if exceeding else "ok"
    return Finding(verdict, worst.short, tolerance, _listed(exceeding))


def _listed(names: Sequence[str]) -> str:
    return shortened(names, NAMES_SHOWN) if names else ""


def _agrees(name: str) -> Callable[[Evidence], Finding]:
    def find(evidence: Evidence) -> Finding:
        reference = evidence.outcomes[REFERENCE]
        return _decided(within_rounding(reference, evidence.outcomes[name], evidence.sizes.steps))

    return find


def _has_the_bits(name: str) -> Callable[[Evidence], Finding]:
    def find(evidence: Evidence) -> Finding:
        outcomes = evidence.outcomes
        return _decided(bit_for_bit(outcomes[REFERENCE], outcomes[name], evidence.sizes.steps))

    return find


def _resume(evidence: Evidence) -> Finding:
    sizes = evidence.sizes
    reference = evidence.outcomes[REFERENCE]
    # The resumed run has no log lines of the steps before its checkpoint.
    return _decided(bit_for_bit(reference, evidence.outcomes["resumed"], sizes.steps, after=sizes.middle))


def _evaluation(evidence: Evidence) -> Finding:
    evaluated = evidence.outcomes["evaluated"]
    # Without one, equal bits would prove nothing.
    if not evaluated.facts.evaluations:
        return Finding("not checked", reason="the recipe made no evaluation after the last step (training.evaluate)")
    return _has_the_bits("evaluated")(evidence)


def _learning_rate(evidence: Evidence) -> Finding:
    expected = [max(rates) for rates in evidence.outcomes[REFERENCE].facts.learning_rates]
    scale = max(expected) or 1.0
    differences: list[Difference] = []
    for name, outcome in evidence.outcomes.items():
        found = [max(rates) for rates in outcome.facts.learning_rates]
        # A resume has the last steps only.
        earlier = len(expected) - len(found)
        # A run without steps has failed, by each check that needs it.
        if not found or earlier < 0:
            continue
        apart = [nan_as_infinite(abs(a - b) / scale) for a, b in zip(expected[earlier:], found, strict=True)]
        largest = max(apart)
        step = 1 + earlier + apart.index(largest)
        # Rates are float64 on the host, so only a different count of steps exceeds this.
        differences.append(Difference("rate", largest, 1e-12, f"step {step}, {name}"))
    return _decided(differences)


def _clip(evidence: Evidence) -> Finding:
    limit = evidence.max_grad_norm
    differences: list[Difference] = []
    for name, outcome in evidence.outcomes.items():
        reached = outcome.facts.clipped_norms
        # Under ZeRO the engine clips, and the state of its optimizer shows by how much.
        if outcome.failed or not reached:
            continue
        lines = [outcome.losses[step]["grad_norm"] for step in sorted(outcome.losses)]
        # log_every is 1 in these runs, so each step has its line.
        if len(lines) != len(reached):
            said = f"{name}: the optimizer made {len(reached)} steps in {len(lines)} steps of training"
            return Finding("FAILED", reason=said)
        # Log lines have the norm before the clip.
        wanted = [min(norm, limit) if limit > 0 else norm for norm in lines]
        apart = [nan_as_infinite(abs(a - b) / a if a else b) for a, b in zip(wanted, reached, strict=True)]
        worst = apart.index(max(apart))
        place = f"step {worst + 1}, {name}: {reached[worst]:.4g}, expected {wanted[worst]:.4g}"
        differences.append(Difference("norm", apart[worst], NORM_TOLERANCE, place))
    if not differences:
        return Finding("not checked", reason="no optimizer step could be observed")
    found = _decided(differences)
    if found.verdict == "ok" and limit == 0:
        return Finding("ok", found.largest, found.tolerance, "optimizer.max_grad_norm is 0: nothing is clipped")
    return found


def _reductions(evidence: Evidence) -> Finding:
    facts = evidence.outcomes["two_processes"].facts
    # The first step of a process may reduce once more, to lay out DDP's buckets.
    counted = facts.reduced[1:]
    if not facts.reduced:
        return Finding("not checked", reason="DDP takes one communication hook, and the recipe has its own")
    expected = 1
    # This option reduces after each micro-batch by design.
    if evidence.options["sync"] == "every":
        sizes = evidence.sizes
        expected = accumulation_steps(sizes.batch, 2, sizes.on_layouts)
    apart = [abs(value - expected) for value in counted]
    place = f"{counted[apart.index(max(apart))]:.3g} in a step, expected {expected}"
    return _decided([Difference("reductions", max(apart), SHARE_TOLERANCE, place)])


def _gradient_paths(evidence: Evidence) -> Finding:
    facts = evidence.outcomes[REFERENCE].facts
    frozen = set(facts.always_frozen)
    checked = [name for name in facts.groups_of if name not in frozen]
    without = [name for name in checked if not facts.largest_gradients.get(name, 0.0)]
    note = f"{len(frozen)} parameters are frozen by the recipe in these steps" if frozen else ""
    if without:
        note = f"no gradient in {evidence.sizes.steps} steps: {_listed(without)}"
    return Finding("FAILED" if without else "ok", f"{len(without)} of {len(checked)} without", "0", note)


def _groups(evidence: Evidence) -> Finding:
    groups = evidence.outcomes[REFERENCE].facts.groups_of
    wrong = [f"{name} in {count or 'none'}" for name, count in groups.items() if count != 1]
    said = f"{len(wrong)} of {len(groups)} are not"
    return Finding("FAILED" if wrong else "ok", said, "0", _listed(wrong))


def _first_step(evidence: Evidence) -> Finding:
    facts = evidence.outcomes[REFERENCE].facts
    if facts.first_moving_step is None:
        return Finding("FAILED", "0 moved", "at least 1", "the optimizer made no step with a gradient")
    reason = "" if facts.moved else f"step {facts.first_moving_step + 1} changed no parameter"
    said = f"{facts.moved} of {len(facts.groups_of)} moved"
    return Finding("ok" if facts.moved else "FAILED", said, "at least 1", reason)


CHECKS = (
    Check(
        "accumulation",
        "equal micro-batches, against one batch",
        ("accumulated",),
        _agrees("accumulated"),
        "The gradient depends on how the batch is divided: give each term's sum and its true weight to the window. Or "
        "the loss of a sample depends on the others of its micro-batch, as with batch norm and with negatives from the "
        "batch (CLIP, InfoNCE): docs/recipes.md, Contrastive losses.",
    ),
    Check(
        "ragged",
        "unequal micro-batches, against one batch",
        ("ragged",),
        _agrees("ragged"),
        "A mean of means, or a micro-batch divided by a size that it does not have: give sums and their true weights. "
        "Or the loss of a sample depends on the others of its micro-batch, as with accumulation.",
    ),
    Check(
        "two_processes",
        "two processes (DDP), against one",
        ("two_processes",),
        _agrees("two_processes"),
        "A draw, a weight or a count depends on the rank: key draws by the sample, multiply by batch['weight'], which "
        "is 0 for a repeated sample. Or the loss of a sample depends on the others of its micro-batch, as with "
        "accumulation. Or a forward is outside the loop over the window, so gradients are reduced too early.",
    ),
    Check(
        "fsdp2",
        "two processes (FSDP2), against one",
        ("fsdp2",),
        _agrees("fsdp2"),
        "As with two_processes, or the loss reads a parameter outside the forward, or a forward runs with other "
        "parameters instead of the module's (functional_call), which FSDP2 undoes.",
    ),
    Check(
        "zero2",
        "two processes (ZeRO-2), against one",
        ("zero2",),
        _agrees("zero2"),
        "As with two_processes; if only the optimizer state is wrong, gradients are clipped differently.",
    ),
    Check(
        "launch_file",
        "your launch file, against one process",
        ("launch_file",),
        _agrees("launch_file"),
        "As with two_processes.",
    ),
    Check(
        "learning_rate",
        "learning rate of each step, on each layout",
        ("two_processes",),
        _learning_rate,
        "The schedule counts something other than optimizer steps: set the rate by opened.learning_rate_factor(step).",
    ),
    Check(
        "sample_order",
        "samples of a micro-batch reversed",
        ("reversed",),
        _agrees("reversed"),
        "A draw depends on the place in the micro-batch: key it by batch['occurrence'] with accel_train.rng.",
    ),
    Check(
        "unkeyed_draws",
        "global generators in another state",
        ("other_generators",),
        _has_the_bits("other_generators"),
        "Something draws from the global generator of torch, numpy or Python, such as dropout or torch.rand in the "
        "loss: draw with accel_train.rng. Other checks may fail because of it.",
    ),
    Check(
        "repeat",
        "the same run twice",
        ("again",),
        _has_the_bits("again"),
        "The run depends on the clock, the process or memory: it draws its own seed, or a kernel has no fixed order.",
    ),
    Check(
        "resume",
        "saved and resumed in the middle",
        ("resumed",),
        _resume,
        "Something that training depends on is not in the checkpoint, or is reset after the restore.",
    ),
    Check(
        "evaluation",
        "an evaluation in the middle",
        ("evaluated",),
        _evaluation,
        "The evaluation leaves a trace: modules in eval mode, changed weights, or draws from a global generator.",
    ),
    Check(
        "gradient_paths",
        "a gradient for each trained parameter",
        (),
        _gradient_paths,
        "These keep their initial values: a detach, a no_grad, or a module that the loss does not use. After a layer "
        "whose weights begin at 0, or in a later stage of training, the gradient comes later: give more --steps. A "
        "term with coefficient 0 has no gradient.",
    ),
    Check(
        "optimizer_groups",
        "each of them in one group of the optimizer",
        (),
        _groups,
        "A parameter in no group is never trained: set requires_grad before preparation.prepare.",
    ),
    Check(
        "clip",
        "gradient norm that reaches the optimizer",
        ("two_processes",),
        _clip,
        "The gradient is not clipped as optimizer.max_grad_norm says: pass it to window.finish, before optimizer.step.",
    ),
    Check(
        "reductions",
        "gradient reductions in a step (DDP)",
        ("two_processes",),
        _reductions,
        "More communication than needed: forward and backward both belong inside the loop over the window.",
    ),
    Check(
        "first_step",
        "weights move once the learning rate is not 0",
        (),
        _first_step,
        "The optimizer is not stepped, or its gradients are cleared before the step.",
    ),
)
