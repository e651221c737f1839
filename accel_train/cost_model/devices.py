"""Rates of a named device: shares of its data sheet, or from a file of ``accel-train calibrate``.

The table has memory bandwidths and links. Peaks of products are in ``speed.device_peaks``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from accel_train.config import UsageError, expand_path
from accel_train.cost_model import record, times
from accel_train.cost_model.rates import LINK_SHARE, LINKS, RULE, Link, Rates, rate
from accel_train.cost_model.record import Calibration
from accel_train.speed.device_peaks import fp32_flops, peak_flops
from accel_train.wording import did_you_mean


class Host(NamedTuple):
    """The machine around a GPU. A usual one is assumed by a rule."""

    link: str
    link_gbs: float
    """GB/s between host memory and the GPU, in one direction."""
    memory: str
    memory_gbs: float
    """Bandwidth of its memory in GB/s, which its GPUs share."""


class Device(NamedTuple):
    """One model of GPU, by the vendor's data sheet."""

    torch_name: str
    """``torch.cuda.get_device_name``, the key of the table of peaks."""
    memory_gbs: float
    """Bandwidth of its memory in GB/s."""
    link: str
    link_gbs: float
    """GB/s from one GPU to the others of its machine: one direction, half of the bidirectional sum on data sheets."""
    source: str
    host: Host


# GB/s of 16 lanes in one direction.
_PCIE_3 = ("PCIe 3 x16", 16.0)
_PCIE_4 = ("PCIe 4 x16", 32.0)
_PCIE_5 = ("PCIe 5 x16", 64.0)
_SERVER_3 = Host(*_PCIE_3, "6 channels of DDR4-2666", 128.0)
_SERVER_4 = Host(*_PCIE_4, "8 channels of DDR4-3200", 204.8)
_SERVER_5 = Host(*_PCIE_5, "8 channels of DDR5-4800", 307.2)
_DESKTOP_4 = Host(*_PCIE_4, "2 channels of DDR4-3200", 51.2)
_DESKTOP_4_DDR5 = Host(*_PCIE_4, "2 channels of DDR5-5600", 89.6)
_DESKTOP_5 = Host(*_PCIE_5, "2 channels of DDR5-5600", 89.6)

DEVICES = {
    "v100-sxm": Device("Tesla V100-SXM2-32GB", 900, "NVLink 2", 150, "NVIDIA V100 data sheet", _SERVER_3),
    "t4": Device("Tesla T4", 320, *_PCIE_3, "NVIDIA T4 data sheet", _SERVER_3),
    "a100-40gb-sxm": Device("NVIDIA A100-SXM4-40GB", 1555, "NVLink 3", 300, "NVIDIA A100 data sheet", _SERVER_4),
    "a100-80gb-sxm": Device("NVIDIA A100-SXM4-80GB", 2039, "NVLink 3", 300, "NVIDIA A100 data sheet", _SERVER_4),
    "a100-80gb-pcie": Device("NVIDIA A100 80GB PCIe", 1935, *_PCIE_4, "NVIDIA A100 data sheet", _SERVER_4),
    "a10": Device("NVIDIA A10", 600, *_PCIE_4, "NVIDIA A10 data sheet", _SERVER_4),
    "a30": Device("NVIDIA A30", 933, *_PCIE_4, "NVIDIA A30 data sheet, without NVLink bridges", _SERVER_4),
    "a40": Device("NVIDIA A40", 696, *_PCIE_4, "NVIDIA A40 data sheet, without NVLink bridges", _SERVER_4),
    "l4": Device("NVIDIA L4", 300, *_PCIE_4, "NVIDIA L4 data sheet", _SERVER_4),
    "l40s": Device("NVIDIA L40S", 864, *_PCIE_4, "NVIDIA L40S data sheet", _SERVER_4),
    "h100-sxm": Device("NVIDIA H100 80GB HBM3", 3350, "NVLink 4", 450, "NVIDIA H100 data sheet", _SERVER_5),
    "h100-pcie": Device(
        "NVIDIA H100 PCIe", 2000, *_PCIE_5, "NVIDIA H100 data sheet, without NVLink bridges", _SERVER_5
    ),
    "h100-nvl": Device("NVIDIA H100 NVL", 3900, *_PCIE_5, "NVIDIA H100 data sheet, without NVLink bridges", _SERVER_5),
    "h200": Device("NVIDIA H200", 4800, "NVLink 4", 450, "NVIDIA H200 data sheet", _SERVER_5),
    "b200": Device("NVIDIA B200", 8000, "NVLink 5", 900, "NVIDIA Blackwell architecture brief: HGX B200", _SERVER_5),
    "rtx-3090": Device(
        "NVIDIA GeForce RTX 3090", 936, *_PCIE_4, "NVIDIA GA102 paper, without NVLink bridges", _DESKTOP_4
    ),
    "rtx-4090": Device("NVIDIA GeForce RTX 4090", 1008, *_PCIE_4, "NVIDIA Ada architecture paper", _DESKTOP_4_DDR5),
    "rtx-5090": Device(
        "NVIDIA GeForce RTX 5090", 1792, *_PCIE_5, "NVIDIA RTX Blackwell architecture paper", _DESKTOP_5
    ),
}
"""Devices by their names for ``--device``."""
DEFAULT = "h100-sxm"
"""Without ``--device``, candidates are compared by the rates of this one, and no time is printed."""
FILE = ".json"
"""The ending of a file of ``accel-train calibrate``."""
COPIES = 4
"""A link without a data sheet gets the bandwidth of a copy divided by this. Each byte is read and written twice: into a
buffer between the processes, and out of it."""


@dataclass(frozen=True)
class Rated:
    """A device with its rates, and the origin of each."""

    name: str
    rates: Rates
    origins: Mapping[str, str]
    """Texts with value and origin, by the names of ``Rates`` and by ``host``, ``link`` and ``latency``."""
    source: str
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return every rate with its origin."""
        rates = self.rates
        values: dict[str, Any] = {"products": rates.products, "attention": rates.attention, "moved": rates.moved}
        values |= {"host": rates.host_seconds, "copied": rates.copied, "on_host": rates.on_host}
        values["link"] = {kind: link.bytes_per_second for kind, link in rates.links.items()}
        values["latency"] = {kind: link.latency_seconds for kind, link in rates.links.items()}
        figures = {name: {"value": values[name], "origin": origin} for name, origin in self.origins.items()}
        return {"figures": figures, "source": self.source, "notes": list(self.notes)}


def rated(name: str, precision: str, gpus: int) -> Rated:
    """Return the device of the table, or of a calibration of this precision. Raises ``UsageError``."""
    if name.endswith(FILE):
        return by_calibration(name, record.read(expand_path(name)), precision, gpus)
    return by_data_sheet(name_in_table(name), *find_device(name, precision), gpus)


def is_cpu(name: str) -> bool:
    """Return True for the calibration of a CPU. Raises ``UsageError`` for an unknown name, or a damaged file."""
    if name.endswith(FILE):
        return record.read(expand_path(name)).machine.device_type == "cpu"
    name_in_table(name)
    return False


def refuse_several_machines(name: str, link: str) -> None:
    """Raise ``UsageError`` for a calibration over several machines: its links are those between them already."""
    if not name.endswith(FILE):
        return
    machine = record.read(expand_path(name)).machine
    if machine.num_machines > 1:
        raise UsageError(
            f"link: {link}: {name} was measured over {machine.num_machines} machines, and its links are those between "
            "them; a calibration of one machine is required. Measure on one, or leave --link out and give "
            f"--gpus_per_machine {machine.processes}"
        )


def by_data_sheet(name: str, device: Device, peak: float, gpus: int) -> Rated:
    """Return the rates of a device whose products have a peak of ``peak`` FLOP/s."""
    host = device.host
    shared = f" for {gpus} GPUs" if gpus > 1 else ""
    matrix = f"{peak / 1e12:g} TFLOP/s"
    origins = {
        "products": f"{times.PRODUCT_SHARE:.0%} of {matrix}",
        "attention": f"{times.ATTENTION_SHARE:.0%} of {matrix}",
        "moved": f"{times.MEMORY_SHARE:.0%} of {device.memory_gbs:g} GB/s",
        "host": f"{times.HOST_SECONDS * 1e6:g} us, {RULE}",
        "link": f"{LINK_SHARE:.0%} of {device.link_gbs:g} GB/s of {device.link}",
        "latency": f"{times.LATENCY_SECONDS * 1e6:g} us, {RULE}",
        "copied": f"{LINK_SHARE:.0%} of {host.link_gbs:g} GB/s of {host.link}, {RULE}",
        "on_host": f"{times.HOST_MEMORY_SHARE:.0%} of {host.memory_gbs:g} GB/s of {host.memory}{shared}, {RULE}",
    }
    source = f"rates from the data sheet ({device.source}); their shares measured on an H200, those of links by a rule"
    return Rated(name, times.rates_of(device, peak, gpus), origins, source)


def by_calibration(name: str, calibration: Calibration, precision: str, gpus: int) -> Rated:
    """Return measured rates. Raises ``UsageError`` if they are of another precision."""
    machine = calibration.machine
    if machine.precision != precision:
        raise UsageError(
            f"device: {name}: measured in {machine.precision}, and the step is in precision {precision}: a calibration "
            f"in the same is required. Give --precision {machine.precision}, or measure: accel-train calibrate "
            f"--precision {precision}"
        )
    figures = calibration.figures
    links, how = _links(calibration)
    share = _share(calibration, gpus)
    rates = Rates(
        products=figures.products.value * share,
        attention=figures.attention.value * share,
        moved=figures.operators.value * share,
        host_seconds=1 / (figures.host.value * share),
        links=links,
        # Measured while that many processes step. More of them share the same memory.
        on_host=figures.adamw.value * min(1, machine.processes / gpus),
        copied=figures.transfer.value,
        serial=machine.device_type == "cpu",
    )
    shown = {"products": figures.products, "attention": figures.attention, "moved": figures.operators}
    shown |= {"copied": figures.transfer, "on_host": figures.adamw}
    origins = {key: f"{rate(figure.value, figure.unit)}, {calibration.origin}" for key, figure in shown.items()}
    origins["host"] = f"{1e6 / figures.host.value:.3g} us, {calibration.origin}"
    if share < 1:
        # Transfers and host memory have other limits than cores.
        for key in ("products", "attention", "moved", "host"):
            origins[key] = f"{share:.0%} of the cores' time: {origins[key]}"
    bandwidths = {kind: rate(link.bytes_per_second, "B/s") for kind, link in links.items()}
    latencies = {kind: f"{link.latency_seconds * 1e6:.3g} us" for kind, link in links.items()}
    origins |= {"link": f"{_shown(bandwidths)}, {how}", "latency": f"{_shown(latencies)}, {how}"}
    source = (
        f"rates {calibration.origin}: {machine.device}, {machine.precision}, {machine.processes} process(es) of "
        f"{machine.threads} thread(s), torch {machine.torch}"
    )
    return Rated(name, rates, origins, source, tuple(_notes(calibration, gpus)))


def _share(calibration: Calibration, processes: int) -> float:
    """Return the part of the measured rates that each of ``processes`` of a machine gets. They share a CPU's cores."""
    if calibration.machine.device_type == "cpu":
        return calibration.machine.share_of_cores(processes)
    return 1.0


def _links(calibration: Calibration) -> tuple[dict[str, Link], str]:
    """Return the measured links, or those of the rule for one process, and their origin."""
    links: dict[str, Link] = {}
    for kind, figure in calibration.links.by_kind().items():
        if figure.bytes_per_second is not None and figure.latency_seconds is not None:
            links[kind] = Link(figure.latency_seconds, figure.bytes_per_second)
    if links:
        return links, calibration.origin
    sheet = [device for device in DEVICES.values() if device.torch_name == calibration.machine.device]
    bandwidth = calibration.figures.copy.value / COPIES
    how = f"{RULE}: a quarter of a copy"
    if sheet:
        bandwidth = sheet[0].link_gbs * 1e9 * LINK_SHARE
        how = f"{RULE}: {LINK_SHARE:.0%} of {sheet[0].link}"
    return dict.fromkeys(LINKS, Link(times.LATENCY_SECONDS, bandwidth)), how


def _shown(by_kind: Mapping[str, str]) -> str:
    """Return the value of each kind of collective, or the one value that all have."""
    values = set(by_kind.values())
    return values.pop() if len(values) == 1 else ", ".join(f"{kind} {value}" for kind, value in by_kind.items())


def _notes(calibration: Calibration, gpus: int) -> list[str]:
    notes: list[str] = []
    machine = calibration.machine
    processes = machine.processes
    if processes == 1 < gpus:
        notes.append(
            f"measured with one process, so its links are by a rule, and {gpus} share its rate of host memory: "
            f"calibrate with {gpus} processes"
        )
    elif processes != gpus:
        notes.append(f"measured with {processes} processes at once, and used for {gpus}: their rates may differ")
    share = _share(calibration, gpus)
    if share < 1:
        notes.append(
            f"{gpus} processes of {machine.threads} thread(s) share {machine.cores} core(s), so each "
            f"computes at {share:.0%} of what was measured"
        )
    machines = machine.num_machines
    if machines > 1:
        notes.append(f"measured over {machines} machines, so its links are those between them")
    noisy = calibration.noisy()
    if noisy:
        notes.append(f"the machine was not quiet when measured: {', '.join(noisy)}")
    return notes


def find_device(name: str, precision: str) -> tuple[Device, float]:
    """Return a device and the peak of its products in FLOP/s. Raises ``UsageError`` for one without such units."""
    device = DEVICES[name_in_table(name)]
    peak = peak_flops(device.torch_name, precision)
    if precision == "fp32":
        # Products of a run do not use TF32: torch has it off by default, and nothing switches it on.
        peak = fp32_flops(device.torch_name)
    if peak is None:
        raise UsageError(
            f"device: {name}: it has no matrix units for precision {precision}; another precision or device is "
            "required. Give --precision fp32"
        )
    return device, peak


def name_in_table(name: str) -> str:
    """Return the table's name of a device, which may be given as nvidia-smi shows it. Raises ``UsageError``."""
    letters = _letters(name)
    for known, device in DEVICES.items():
        if letters in (_letters(known), _letters(device.torch_name)):
            return known
    # Variants of the same model. The nearest spelling may be another model, such as l40s for l40 or h200 for h20.
    forms = [known for known in DEVICES if letters in _beginnings(known)]
    meant = did_you_mean("".join(forms[:1]))
    if len(forms) > 1:
        meant = f" (did you mean one of {', '.join(forms)}?)"
    raise UsageError(
        f"device: {name}: one of the table is required, or a file of accel-train calibrate with the ending {FILE}: "
        f"{', '.join(DEVICES)}{meant}; give one of them, measure another one with accel-train calibrate, or leave "
        "--device out to do without a step time"
    )


def _beginnings(known: str) -> list[str]:
    """Return the first words of a name in the table, joined: names of a model with several variants."""
    words = known.split("-")
    return [_letters("".join(words[:count])) for count in range(1, len(words))]


def _letters(name: str) -> str:
    """Return letters and digits in lower case, without the vendor's words in front."""
    joined = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce|tesla)?", "", joined)
