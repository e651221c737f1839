"""Frozen linear layers in 8 or 4 bits: LLM.int8 and NF4 by bitsandbytes (arXiv:2208.07339, 2305.14314), float8."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from accel_train.config import UsageError
from accel_train.domains.models.float8 import Float8Linear

Bits = Literal["int8", "nf4", "fp8"]
BITS: tuple[str, ...] = get_args(Bits)
OUTLIERS = 6.0
"""Activation features above this magnitude are multiplied in fp16. The value of the paper, and of transformers."""
PACKED = torch.uint8
"""Dtype that packs two 4-bit values."""


def quantise(model: nn.Module, names: Sequence[str], bits: Bits, *, compute: torch.dtype, device: torch.device) -> None:
    """Replace the linear layers ``names`` by quantised ones, in place, and put them on ``device``.

    Weights go there one by one, so the whole model in its own dtype need not fit. ``compute`` is the dtype for
    multiplying four-bit values; int8 multiplies as integers, with outliers in fp16; fp8 in the dtype of its input. On
    the meta device only sizes are set. In a simulation, stand-ins of the same size in bytes take their place. Raises
    ``UsageError`` without bitsandbytes, and on a device that it does not support. fp8 and a simulation do not need it.
    """
    if bits == "fp8":
        for name in names:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear), name
            model.set_submodule(name, Float8Linear.of(layer, device))
        return
    if any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        _simulate(model, names, bits, compute=compute, device=device)
        return
    bnb = _import_bitsandbytes(bits)
    if bits == "int8":
        # bitsandbytes logs at every product that fp32 and bf16 inputs are cast.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear), name
        made = _int8_layer(bnb, layer) if bits == "int8" else _nf4_layer(bnb, layer, compute)
        made.bias = layer.bias
        try:
            made.weight = _on_device(made.weight, bits, device)
        except (RuntimeError, NotImplementedError) as error:
            raise UsageError(
                f"lora.base_precision {bits}: bitsandbytes does not run on {device} of this machine "
                f"({' '.join(str(error).split())[:200]}); use bf16, or a device that it supports"
            ) from None
        model.set_submodule(name, made)


def _simulate(
    model: nn.Module, names: Sequence[str], bits: Bits, *, compute: torch.dtype, device: torch.device
) -> None:
    # Imported here, because training does not need it.
    from accel_train.domains.models.simulated_layers import SimulatedLinear4bit, SimulatedLinear8bit

    if device.type == "cpu":
        device = torch.device("cpu")  # with an index, fake tensors would take it for another device
    table = torch.empty(256, device=device)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear), name
        if bits == "int8":
            model.set_submodule(name, SimulatedLinear8bit.of(layer, device))
            continue
        # bitsandbytes has one table on the host, and copies it to a device for each layer.
        own = table if device.type == "cpu" else table.clone()
        model.set_submodule(name, SimulatedLinear4bit.of(layer, compute, own))


def _import_bitsandbytes(bits: Bits) -> Any:
    try:
        import bitsandbytes
    except ImportError:
        raise UsageError(
            f"lora.base_precision {bits}: needs bitsandbytes; run pip install 'accel-train[lora,bitsandbytes]'"
        ) from None
    return bitsandbytes


def _has_bias(layer: Any) -> bool:
    return layer.bias is not None


def _int8_layer(bnb: Any, layer: nn.Linear) -> Any:
    sizes = (layer.in_features, layer.out_features, _has_bias(layer))
    made = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=OUTLIERS, device="meta")
    values = layer.weight.data
    if values.device.type != "meta":
        values = values.cpu()  # it quantises during the copy to a device, and not a weight that is there already
    # Without fp16 weights beside the 8 bits: they serve updates, and this layer is frozen.
    made.weight = bnb.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False)
    return made


def _nf4_layer(bnb: Any, layer: nn.Linear, compute: torch.dtype) -> Any:
    sizes = (layer.in_features, layer.out_features, _has_bias(layer))
    # The scales of blocks are quantised as well, as in the paper.
    made = bnb.nn.Linear4bit(*sizes, compute, compress_statistics=True, quant_type="nf4", device="meta")
    made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=made)
    # On some CPUs it would repack the weights in the first evaluation, and compute differently from then on.
    made.support_avx512bf16_for_cpu = False
    return made


def _on_device(weight: Any, bits: Bits, device: torch.device) -> Any:
    """Quantise a weight on ``device``. One on the meta device takes its quantised size."""
    if weight.device.type != "meta":
        return weight.to(device)
    if bits == "int8":
        weight.data = torch.empty(weight.shape, dtype=torch.int8, device="meta")
    else:
        weight.data = torch.empty(((weight.numel() + 1) // 2, 1), dtype=PACKED, device="meta")
    return weight


def dequantise(model: nn.Module) -> None:
    """Replace quantised layers by plain ones with their dequantised values in fp32, in place, on their device."""
    # A list, because the loop replaces modules.
    for name, module in list(model.named_modules()):
        if not is_quantised(module):
            continue
        layer: Any = module
        values = _values(layer).float()
        # On the meta device, because weight and bias are replaced at once.
        made = nn.Linear(layer.in_features, layer.out_features, _has_bias(layer), device="meta")
        made.weight = nn.Parameter(values, requires_grad=False)
        made.bias = layer.bias
        model.set_submodule(name, made)


def is_quantised(module: nn.Module) -> bool:
    """Return True for a linear layer of bitsandbytes, or in float8."""
    names = ("Linear8bitLt", "Linear4bit", "Float8Linear", "SimulatedLinear8bit", "SimulatedLinear4bit")
    return type(module).__name__ in names


def _values(layer: Any) -> torch.Tensor:
    if isinstance(layer, Float8Linear):
        return layer.values()
    import bitsandbytes.functional as functions

    if type(layer).__name__ == "Linear4bit":
        return functions.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    # The first forward moves the scales from the weight to the state.
    scales = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    return functions.int8_vectorwise_dequant(layer.weight.data, scales)


def count_values(parameter: nn.Parameter) -> int:
    """Return the number of values of a parameter, two for each byte of packed 4-bit values."""
    return parameter.numel() * (2 if parameter.dtype == PACKED else 1)
