"""A plan as text or as JSON. Each figure has its origin: exact, modelled, a rule, or measured on another device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from accel_train.cost_model.devices import FILE, Rated
from accel_train.cost_model.rates import RULE
from accel_train.cost_model.report import EXACT, MODELLED, time_lines
from accel_train.planning.candidates import BLOCKS, LAUNCH_FILES, MICRO_BATCH, MODE, MODES
from accel_train.planning.memory import GIB, HOST_RULES
from accel_train.planning.plan import Plan
from accel_train.planning.probe import Probe
from accel_train.simulation.ledger import BATCH, BLOCK, CATEGORIES, TEMPORARY

MACHINE_GPUS = 8
"""Usual maximum of GPUs in one machine. A plan for more has a note about several machines."""
NEAREST = 5
"""Alternatives listed by --explain."""


def describe(plan: Plan, named: Rated | None, *, explain: bool) -> str:
    """Describe a plan for a person. Without a device there is no step time."""
    chosen = plan.chosen
    counted = chosen.counted
    device = f" ({named.name})" if named else ""
    lines = [
        f"{plan.recipe} on {plan.budget.machine()}{device}, goal {plan.goal}",
        f"{counted['values']:,} parameters, {counted['precision']}; step {counted['step']:,} simulated",
        "",
        *_values(plan),
        "",
        *_memory(plan),
        *_host_memory(plan),
        "",
        *_time(chosen, named),
    ]
    if explain:
        lines += ["", *_alternatives(plan, named)]
    lines += ["", "not considered:"]
    lines += [f"  {name}: {reason}" for name, reason in plan.space.not_considered().items()]
    measured = "" if named and named.name.endswith(FILE) else ", and nothing measured on this GPU"
    lines.append(f"nothing was trained{measured}; evaluations and samples are not simulated")
    return "\n".join(lines)


def _values(plan: Plan) -> list[str]:
    candidate = plan.chosen.candidate
    reasons = plan.reasons()
    size = candidate.micro_batch_size
    count = plan.chosen.micro_batches
    values = {"launch file": LAUNCH_FILES[candidate.strategy], MICRO_BATCH: str(size), MODE: candidate.mode}
    if candidate.mode != MODES[0]:
        values[BLOCKS] = f"{plan.chosen.checkpointed} of {plan.chosen.counted['blocks']}"
    lines = [f"{name:<32}{value:<20}{reasons[name]}" for name, value in values.items()]
    processes = "process(es)" if plan.budget.on_cpu else "GPU(s)"
    product = f"{plan.space.global_batch_size:,} = {size} x {plan.space.gpus} {processes} x {count} accumulated"
    if count != plan.space.micro_batches(candidate):
        # Samples of several shapes: a micro-batch has one of them, and need not be full.
        product = f"{count} micro-batches of at most {size} in the simulated step, each of one shape"
    lines.append(f"{'global_batch_size':<32}{plan.space.global_batch_size:<20,}unchanged: {product}")
    mode = plan.space.compile_mode
    if mode != "off":
        lines.append(f"{'compile.mode':<32}{mode:<20}unchanged: simulated as off")
    if plan.space.gpus > MACHINE_GPUS:
        lines.append(
            f"note: {plan.space.gpus} GPUs are planned as one machine. For several, add num_machines and "
            "main_process_ip as in multi_node.yaml; their network is not in the time"
        )
    return lines


def origin_of_category(probe: Probe, category: str) -> str:
    """Return the origin of the bytes of a category."""
    extended = probe.simulated < probe.micro_batches and category in (BATCH, TEMPORARY)
    return MODELLED if extended else EXACT


def _memory(plan: Plan) -> list[str]:
    probe = plan.chosen
    lines = [f"memory of {plan.budget.memory} at its peak, {probe.place}"]
    total = sum(probe.by_category.values())
    for category in CATEGORIES:
        size = probe.by_category[category]
        if size:
            origin = origin_of_category(probe, category)
            if origin == MODELLED:
                origin += f": {probe.simulated} of {probe.micro_batches} micro-batches simulated"
            lines.append(_row(category, size / GIB, origin))
    lines.append(_row("rounding", (probe.tensors - total) / GIB, f"{MODELLED}: blocks of {BLOCK} B"))
    reasons = {rule.name: rule.reason for rule in plan.budget.rules}
    rules = plan.budget.parts_gib(probe.tensors)
    lines += [_row(name, size, f"{RULE}: {reasons[name]}") for name, size in rules.items()]
    needed = probe.needed_gib(plan.budget)
    lines.append(_row("needed", needed, MODELLED))
    budget = plan.budget
    limit = f"{budget.vram_gib:g} less a margin of {budget.margin_gib:.2f}"
    if budget.share < 1:
        limit = f"{budget.share:.0%} of {limit}"
    lines.append(_row("limit", budget.limit_gib, limit))
    return lines


def _host_memory(plan: Plan) -> list[str]:
    """Describe what an offload keeps in host memory."""
    budget = plan.budget
    sizes = plan.chosen.on_host(budget)
    if not sizes:
        return []
    lines = ["", f"host memory of the machine, {budget.processes} process(es)"]
    lines += [_row(name, sizes[name] / GIB, EXACT) for name in CATEGORIES if name in sizes]
    reasons = {rule.name: rule.reason for rule in HOST_RULES}
    rules = budget.host_parts_gib(sum(sizes.values()))
    lines += [_row(name, size, f"{RULE}: {reasons[name]}") for name, size in rules.items()]
    lines.append(_row("needed", plan.chosen.needed_host_gib(budget), MODELLED))
    lines.append(_row("limit", budget.host_limit_gib, f"{budget.host_gib:.4g} less a margin of 5 %"))
    return lines


def _row(name: str, gib: float, origin: str) -> str:
    shown = f"{gib:.2f} GiB"
    if gib < 0.1:
        shown = f"{gib * 1024:.1f} MiB"
    if gib < 0.0001:
        shown = f"{gib * 1024**2:.1f} KiB"
    if gib * GIB < 100:
        shown = f"{gib * GIB:.0f} B"
    return f"  {name:<26}{shown:>12}  {origin}"


def _time(probe: Probe, named: Rated | None) -> list[str]:
    if named is None:
        return ["step time: give --device NAME. Candidates were compared by the rates of an h100-sxm"]
    # Work that is done once per step was counted for each micro-batch.
    counted = EXACT if probe.simulated == probe.micro_batches else MODELLED
    latency = named.rates.latency_seconds(probe.work)
    return time_lines(probe.work, probe.time, latency, named, counted=counted)


def _alternatives(plan: Plan, named: Rated | None) -> list[str]:
    """List the nearest candidates over the limit, those within it, and the chains left out."""
    budget = plan.budget
    nearest = plan.exceeding()[:NEAREST]
    lines = ["nearest that do not fit:"]
    lines += [f"  {probe.candidate}: {probe.needs(budget)}{_at(probe, named)}" for probe in nearest]
    if not nearest:
        lines.append("  none: everything that was simulated fits")
    lines.append("those that fit, the fastest first:")
    others = [probe for chain in plan.chains for probe in chain.probes if probe.fits(budget)]
    for probe in sorted(others, key=lambda probe: probe.time.total):
        mark = " (the plan)" if probe is plan.chosen else ""
        lines.append(f"  {probe.candidate}: {probe.needs(budget)}{_at(probe, named)}{mark}")
    left_out = [chain for chain in plan.chains if chain.left_out]
    if left_out:
        lines.append("not searched further:")
    lines += [f"  {chain.strategy}, {MODE} {chain.mode}: {chain.left_out}" for chain in left_out]
    return lines


def _at(probe: Probe, named: Rated | None) -> str:
    return f", {probe.time.total * 1e3:.2f} ms" if named else ""


def as_json(plan: Plan, named: Rated | None) -> dict[str, Any]:
    """Return the whole plan for JSON, with the origin of each figure."""
    return {
        "recipe": plan.recipe,
        "goal": plan.goal,
        **{name: plan.chosen.counted[name] for name in ("values", "precision", "step")},
        "gpus": plan.space.gpus,
        "on_cpu": plan.budget.on_cpu,
        "vram_gib": plan.budget.vram_gib,
        "margin_gib": plan.budget.margin_gib,
        "limit_gib": plan.budget.limit_gib,
        "host_gib": plan.budget.host_gib,
        "host_limit_gib": plan.budget.host_limit_gib,
        "device": named.name if named else None,
        "rates": named.as_json() if named else None,
        "global_batch_size": plan.space.global_batch_size,
        "blocks_of_model": plan.chosen.counted["blocks"],
        "plan": _probe_json(plan.chosen, plan, named) | {"reasons": plan.reasons()},
        "others": _others_json(plan, named),
        "left_out": [
            {"strategy": chain.strategy, MODE: chain.mode, "reason": chain.left_out, "refused": chain.refused}
            for chain in plan.chains
            if chain.left_out
        ],
        "not_considered": dict(plan.space.not_considered()),
    }


def _others_json(plan: Plan, named: Rated | None) -> Sequence[Mapping[str, Any]]:
    probes = [probe for chain in plan.chains for probe in chain.probes if probe is not plan.chosen]
    return [_probe_json(probe, plan, named) for probe in probes]


def _probe_json(probe: Probe, plan: Plan, named: Rated | None) -> dict[str, Any]:
    origins = {category: origin_of_category(probe, category) for category in probe.by_category}
    rules = plan.budget.parts_gib(probe.tensors)
    origins |= {"host_bytes": EXACT, **dict.fromkeys(("bytes_in_blocks", "needed_gib", "needed_host_gib"), MODELLED)}
    found: dict[str, Any] = {
        "launch_file": LAUNCH_FILES[probe.candidate.strategy],
        **dataclasses.asdict(probe.candidate),
        "micro_batches": probe.micro_batches,
        "simulated_micro_batches": probe.simulated,
        "place": probe.place,
        "fits": probe.fits(plan.budget),
        "needed_gib": probe.needed_gib(plan.budget),
        "host_bytes": probe.on_host(plan.budget),
        "needed_host_gib": probe.needed_host_gib(plan.budget),
        "bytes": dict(probe.by_category),
        "bytes_in_blocks": probe.tensors,
        "rules_gib": rules,
        "work": dataclasses.asdict(probe.work),
        "origins": {**origins, **dict.fromkeys(rules, RULE)},
    }
    if named is not None:
        found["seconds"] = dataclasses.asdict(probe.time) | {"total": probe.time.total}
        found["origins"]["seconds"] = MODELLED
    return found
