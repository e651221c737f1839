"""Results of a simulation, as text, as a table by number of processes, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.simulation.ledger import BLOCK, CATEGORIES, GRADIENTS
from accel_train.wording import readable_size

EXACT = "exact"
MODELLED = "modelled"
MIB = 2**20
HELD = ("parameters", "master weights", "buffers", "gradients", "optimizer state", "EMA")


@dataclass(frozen=True)
class Simulated:
    """One simulated start."""

    counted: Mapping[str, Any]
    """Fields of ``step.Counted``."""
    curve: Sequence[Mapping[str, Any]]
    """Bytes by category over the step."""
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return everything, with the origin of each figure."""
        counted = dict(self.counted)
        origins = dict.fromkeys(counted, EXACT)
        origins["peak_in_blocks"] = MODELLED
        origins["collectives.sent"] = MODELLED
        origins["peak"] = _origin_of_peak(self.counted)
        return {**counted, "origins": origins, "notes": list(self.notes), "curve": list(self.curve)}


def describe(simulated: Simulated) -> str:
    """Describe the step of one process."""
    counted = simulated.counted
    frozen = counted["values"] - counted["trained"]
    of_them = f", {frozen:,} of them frozen" if frozen else ""
    lines = [f"note: {note}" for note in simulated.notes]
    lines += [
        f"one of {counted['processes']:,} process(es), {counted['strategy']}, {counted['precision']}; "
        f"{counted['values']:,} parameters{of_them}",
        f"step {counted['step']:,}, global batch {counted['global_batch_size']:,}: {counted['micro_batches']} "
        f"micro-batch(es) of at most {counted['rows']} on this process",
        "",
        *_memory(counted),
        "",
        *_collectives(counted["collectives"]),
        "",
        f"{'FLOPs of a step':<34}{counted['flops']:>12.4g}  exact: products, convolutions and attention",
        "nothing was trained; not in these bytes: kernels' workspaces, NCCL's buffers, the CUDA context, fragmentation",
    ]
    return "\n".join(lines)


def _memory(counted: Mapping[str, Any]) -> list[str]:
    peak = counted["peak"]
    parts: Mapping[str, int] = peak["by_category"]
    lines = [f"{'memory of this process':<26}{'at rest':>10}{'at the peak':>14}"]
    for category in CATEGORIES:
        held = counted["held"].get(category, 0)
        if held or parts[category]:
            shown = readable_size(held) if held else ""
            if category == GRADIENTS and held:
                # They exist only from the backward to the end of the step.
                shown += "*"
            lines.append(f"  {category:<24}{shown:>10}{readable_size(parts[category]):>14}  {EXACT}")
    origin = _origin_of_peak(counted)
    lines.append(f"  {'peak':<24}{'':>10}{readable_size(peak['total']):>14}  {origin}: {peak['place']}")
    lines.append(
        f"  {'peak in blocks':<24}{'':>10}{readable_size(counted['peak_in_blocks']):>14}  {MODELLED}: each tensor "
        f"rounded up to {BLOCK} B, as on a GPU"
    )
    if counted["held"].get(GRADIENTS):
        lines.append("  * while the optimizer steps")
    copied, written = (readable_size(counted["save"][name]) for name in ("copied", "written"))
    lines.append(f"  a save copies {copied} into this process's host memory, for a checkpoint of {written}  {EXACT}")
    return lines + _host(counted.get("host", {}))


def _host(host: Mapping[str, int]) -> list[str]:
    """Describe what an offload keeps in host memory."""
    if not host:
        return []
    lines = ["", f"{'host memory, of this process':<26}{'at rest':>8}"]
    sizes = {name: host[name] for name in CATEGORIES if name in host} | {"sum": sum(host.values())}
    lines += [f"  {name:<24}{readable_size(size):>10}{'':>14}  {EXACT}" for name, size in sizes.items()]
    return lines


def _origin_of_peak(counted: Mapping[str, Any]) -> str:
    """Copies between host and device are not among the tensors of a CPU."""
    return MODELLED if counted.get("host") else EXACT


def _collectives(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["collectives of a step: none"]
    lines = [f"{'collectives of a step':<22}{'group':>7}{'count':>8}{'tensors':>12}{'sent':>12}"]
    for row in rows:
        size = readable_size(row["size"])
        sent = readable_size(row["sent"])
        lines += [f"  {row['kind']:<20}{row['group_size']:>7,}{row['count']:>8,}{size:>12}{sent:>12}"]
    lines.append("  count and size of whole tensors: exact. Sent by each process: modelled, as a ring")
    return lines


COLUMNS = ("processes", "global batch", "states", "gathered", "activations", "peak", "sent", "FLOPs")


def table(found: Sequence[Simulated]) -> str:
    """Return a table with a line for each number of processes."""
    rows = [_row(simulated.counted) for simulated in found]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    # Most notes are the same for every number of processes.
    lines = list(dict.fromkeys(f"note: {note}" for simulated in found for note in simulated.notes))
    first = found[0].counted
    lines.append(f"one process of each, {first['strategy']}, {first['precision']}; {first['values']:,} parameters")
    for row in (COLUMNS, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells))
    lines += [
        "states: parameters, gradients, optimizer state and EMA. gathered and activations: their part of the peak",
        "exact, but for what a process sends in a step: modelled, as a ring",
    ]
    return "\n".join(lines)


def _row(counted: Mapping[str, Any]) -> tuple[str, ...]:
    held = counted["held"]
    peak = counted["peak"]
    parts = peak["by_category"]
    gathered = parts["gathered weights"] + parts["communication buffers"]
    return (
        f"{counted['processes']:,}",
        f"{counted['global_batch_size']:,}",
        readable_size(sum(held.get(name, 0) for name in HELD)),
        readable_size(gathered),
        readable_size(parts["activations"]),
        readable_size(peak["total"]),
        readable_size(sum(row["sent"] for row in counted["collectives"])),
        f"{counted['flops']:.3g}",
    )


def draw(simulated: Simulated, path: Path) -> None:
    """Draw the memory by category into ``path``, over the allocations and releases of a step."""
    import matplotlib as mpl

    # Needs no display.
    mpl.use("Agg")
    from matplotlib import pyplot

    curve = simulated.curve
    present = [name for name in CATEGORIES if any(point[name] for point in curve)]
    layers = [[point[name] / MIB for point in curve] for name in present]
    counted = simulated.counted
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    colours = [mpl.colormaps["tab20"](number) for number in range(len(present))]
    axes.stackplot(range(len(curve)), layers, labels=present, colors=colours)
    totals = [sum(point[name] for name in present) for point in curve]
    peak = totals.index(max(totals))
    axes.axvline(peak, color="black", linewidth=0.8, linestyle=":")
    axes.set_title(
        f"{counted['strategy']}, one of {counted['processes']:,} process(es): peak in {counted['peak']['place']}",
        fontsize=10,
    )
    axes.set_xlabel("allocations and releases of one optimizer step")
    axes.set_ylabel("MiB")
    axes.margins(x=0)
    # Beside the curve, so that it hides none of it.
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
