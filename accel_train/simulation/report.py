"""Results of a simulation as text, as a table by number of processes, as JSON, or as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.config import UsageError, expand_path, refuse_unusable_folder
from accel_train.cost_model.report import EXACT, MODELLED, source_lines, time_lines
from accel_train.cost_model.scaling import Point, Scaling
from accel_train.simulation.ledger import BLOCK, CATEGORIES, GRADIENTS
from accel_train.wording import readable_size

if TYPE_CHECKING:
    from accel_train.cost_model.steps import TimedStep

UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
"""Bytes in each unit of the memory axis. The text uses the same units."""
HELD = ("parameters", "master weights", "buffers", "gradients", "optimizer state", "EMA")


@dataclass(frozen=True)
class Simulated:
    """One simulated start."""

    counted: Mapping[str, Any]
    """Fields of ``step.Counted``."""
    curve: Sequence[Mapping[str, Any]]
    """Bytes by category over the step, one entry per point."""
    notes: tuple[str, ...]
    timed: TimedStep | None = None
    """Step time. None without ``--device``."""
    is_another: bool = False
    """True: its global batch is not the config's, which a start with this number of processes would refuse."""

    def as_json(self, scaling: Scaling | None = None) -> dict[str, Any]:
        """Return all results, with the origin of each number: exact or modelled."""
        counted = dict(self.counted)
        origins = dict.fromkeys(counted, EXACT)
        origins["peak_in_blocks"] = MODELLED
        origins["collectives.sent"] = MODELLED
        origins["peak"] = _origin_of_peak(self.counted)
        if self.timed is not None and scaling is not None:
            counted["time"] = self.timed.as_json()
            efficiency = scaling.efficiency(self.timed.point)
            counted["scaling"] = {"efficiency": efficiency, **scaling.as_json()}
            origins |= {"time": MODELLED, "scaling": MODELLED}
        return {**counted, "origins": origins, "notes": list(self.notes), "curve": list(self.curve)}


def scaling_of(simulations: Sequence[Simulated], *, is_weak: bool) -> Scaling | None:
    """Return the scaling over all numbers of processes, None without step times."""
    points = [simulated.timed.point for simulated in simulations if simulated.timed is not None]
    if not points:
        return None
    return Scaling(points, is_weak)


def progress(counted: Mapping[str, Any]) -> str:
    """Return a line for a number of processes that is finished."""
    peak = readable_size(counted["peak"]["total"])
    return f"simulated {counted['processes']:,} process(es), {counted['strategy']}: peak {peak}"


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
        *_time(simulated.timed),
        "nothing was trained; not counted here: kernels' workspaces, NCCL's buffers, the CUDA context, fragmentation",
    ]
    return "\n".join(lines)


def _time(timed: TimedStep | None) -> list[str]:
    if timed is None:
        return []
    lines = time_lines(timed.work, timed.time, timed.latency, timed.device, between=timed.between)
    rate = f"{timed.point.samples_per_second:,.4g} samples per second of {timed.point.processes:,} process(es)"
    return ["", *lines, f"  {rate}, {MODELLED}; not included: waiting for data, saving, evaluations", ""]


def _memory(counted: Mapping[str, Any]) -> list[str]:
    peak = counted["peak"]
    parts: Mapping[str, int] = peak["by_category"]
    lines = [f"{'memory of this process':<26}{'at rest':>10}{'at the peak':>14}"]
    for category in CATEGORIES:
        held = counted["held"].get(category, 0)
        if held or parts[category]:
            shown = readable_size(held) if held else ""
            if category == GRADIENTS and held:
                # Gradients exist only from the backward to the end of the step.
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
    """Describe the host memory that an offload uses. Empty without one."""
    if not host:
        return []
    lines = ["", f"{'host memory, of this process':<26}{'at rest':>8}"]
    sizes = {name: host[name] for name in CATEGORIES if name in host} | {"sum": sum(host.values())}
    lines += [f"  {name:<24}{readable_size(size):>10}{'':>14}  {EXACT}" for name, size in sizes.items()]
    return lines


def _origin_of_peak(counted: Mapping[str, Any]) -> str:
    """Return the origin of the peak: modelled under an offload, whose copies to the device do not exist on a CPU."""
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
TIME_COLUMNS = ("step", "exposed", "efficiency")
ANOTHER = "*"
"""Marks the efficiency of a simulation with another global batch than the config's."""


def table(simulations: Sequence[Simulated], scaling: Scaling | None = None) -> str:
    """Return a table with one line per number of processes, and notes around it."""
    head = COLUMNS
    if scaling is not None:
        head += TIME_COLUMNS
    rows = [_row(simulated.counted) + time_cells(simulated.timed, scaling) for simulated in simulations]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    # Most notes are the same for every number of processes.
    lines = list(dict.fromkeys(f"note: {note}" for simulated in simulations for note in simulated.notes))
    first = simulations[0].counted
    # The strategy may differ: with a single process, a launch file for several gives another one.
    strategies = " and ".join(dict.fromkeys(simulated.counted["strategy"] for simulated in simulations))
    lines.append(f"one process of each, {strategies}, {first['precision']}; {first['values']:,} parameters")
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells))
    lines += [
        "states: parameters, gradients, optimizer state and EMA. gathered and activations: their part of the peak",
        "exact, except what a process sends in a step: modelled, as a ring",
        *_offloaded([simulated.counted for simulated in simulations]),
    ]
    if scaling is not None:
        lines += _scaling(simulations, scaling)
    return "\n".join(lines)


def _offloaded(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the host memory, which the columns leave out. Empty without an offload."""
    if not any(counted.get("host") for counted in found):
        return []
    sizes = ", ".join(readable_size(sum(counted["host"].values())) for counted in found)
    return [f"the peak is modelled under an offload. In addition, in host memory of each process at rest: {sizes}"]


def time_cells(timed: TimedStep | None, scaling: Scaling | None) -> tuple[str, ...]:
    """Return the cells of ``TIME_COLUMNS``, none without a step time."""
    if timed is None or scaling is None:
        return ()
    time = timed.time
    share = time.exposed / time.total
    efficiency = f"{scaling.efficiency(timed.point):.1%}"
    if scaling.is_another(timed.point):
        efficiency += ANOTHER
    return (
        f"{time.total * 1e3:,.1f} ms",
        f"{time.exposed * 1e3:,.1f} ms ({share:.0%})",
        efficiency,
    )


def _scaling(simulations: Sequence[Simulated], scaling: Scaling) -> list[str]:
    """Describe the time columns, and up to how many processes more of them pay."""
    first = scaling.points[0]
    compared = scaling.compared()
    kind = "strong scaling"
    if scaling.is_weak:
        kind = "weak scaling: each process has the same number of micro-batches"
    elif compared:
        kind = f"strong scaling: the global batch stays at {compared[0].global_batch_size:,}"
    lines = [
        f"step, exposed communication (and its share of the step) and efficiency: {MODELLED}",
        f"efficiency: samples per second of a process, against {first.processes:,} process(es); {kind}",
    ]
    if any(scaling.is_another(point) for point in scaling.points):
        lines.append(f"{ANOTHER} with a global batch other than that of the config, so not compared in what pays")
    timed = [simulated.timed for simulated in simulations if simulated.timed is not None]
    # Sources are those of the largest run, which spans the most machines.
    largest = max(timed, key=lambda one: one.point.processes)
    return [*lines, *source_lines(largest.device, largest.between), scaling.describe()]


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


def picture_path(text: str) -> Path:
    """Return the path of ``--picture``. Raises ``UsageError`` unless a picture can be written there."""
    from matplotlib.backend_bases import FigureCanvasBase

    path = expand_path(text)
    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in endings:
        raise UsageError(
            f"picture: {text}: a name with the ending of a picture is required: {', '.join(endings)}; give memory.png"
        )
    if path.is_dir():
        raise UsageError(f"picture: {text}: is a directory; give the name of a file, such as {path}/memory.png")
    if not path.parent.is_dir():
        raise UsageError(f"picture: {text}: {path.parent} does not exist; make it, or give another file")
    refuse_unusable_folder(f"picture: {text}", path.parent)
    return path


def draw(simulated: Simulated, scaling: Scaling | None, path: Path) -> None:
    """Draw the memory by category into ``path``, over the allocations and releases of a step.

    With step times of several numbers of processes, a second panel shows the efficiency.
    """
    import matplotlib as mpl

    # A backend that needs no display.
    mpl.use("Agg")
    from matplotlib import pyplot

    has_two = scaling is not None and len(scaling.points) > 1
    rows = 1 + has_two
    figure = pyplot.figure(figsize=(9, 4.5 * rows), layout="constrained")
    panels = figure.subplots(rows, squeeze=False)
    _draw_memory(simulated, panels[0, 0], mpl.colormaps["tab20"])
    if scaling is not None and has_two:
        _draw_efficiency(scaling, panels[1, 0], _title(simulated))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_memory(simulated: Simulated, axes: Any, colours: Any) -> None:
    curve = simulated.curve
    present = [name for name in CATEGORIES if any(point[name] for point in curve)]
    totals = [sum(point[name] for name in present) for point in curve]
    unit = next((name for name, size in UNITS.items() if max(totals) >= size), "kB")
    layers = [[point[name] / UNITS[unit] for point in curve] for name in present]
    counted = simulated.counted
    axes.stackplot(range(len(curve)), layers, labels=present, colors=[colours(n) for n in range(len(present))])
    peak = totals.index(max(totals))
    axes.axvline(peak, color="black", linewidth=0.8, linestyle=":")
    axes.set_title(
        f"{counted['strategy']}, one of {counted['processes']:,} process(es): peak in {counted['peak']['place']}",
        fontsize=10,
    )
    axes.set_xlabel("allocations and releases of one optimizer step")
    axes.set_ylabel(unit)
    axes.margins(x=0)
    # Beside the curve, so that it hides none of it.
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, fontsize=8, frameon=False)


def _title(simulated: Simulated) -> str:
    timed = simulated.timed
    assert timed is not None, "points of a scaling are of timed steps"
    title = f"{timed.device.name}, {MODELLED}"
    if timed.between:
        title = f"{timed.machines.name} between machines of {timed.machines.gpus} {title}"
    return title


def _draw_efficiency(scaling: Scaling, axes: Any, title: str) -> None:
    """Draw the efficiency: a line through points with the config's global batch, and single points for others."""

    def percent(points: Sequence[Point]) -> list[float]:
        return [100 * scaling.efficiency(point) for point in points]

    same = [point for point in scaling.points if not scaling.is_another(point)]
    others = [point for point in scaling.points if scaling.is_another(point)]
    axes.plot([point.processes for point in same], percent(same), "o-", label=f"{scaling.kind} scaling")
    if others:
        axes.plot([point.processes for point in others], percent(others), "o", mfc="none", label="another global batch")
    pays = scaling.pays_up_to()
    if pays is not None:
        last = pays[0].processes
        axes.axvline(last, color="black", linewidth=0.8, linestyle=":", label=f"pays up to {last:,}")
    numbers = [point.processes for point in scaling.points]
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
    axes.minorticks_off()
    # Efficiency exceeds 100 % where smaller shards of the states save more time than communication takes.
    axes.set_ylim(0, 1.08 * max(100, *percent(scaling.points)))
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("processes")
    axes.set_ylabel(f"efficiency against {scaling.points[0].processes:,} (%)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
