"""C2: our MMDiT block against diffusers' JointTransformerBlock with the same weights: time and operator count.

    python -m benchmarks.mmdit_block --output benchmarks/results/mmdit_block_cpu.json

Four blocks of width 256 as in SD3, the last of which has only keys and values for the text; 256 + 77 tokens, 2 rows,
forward and backward on one thread. SD3 is the block of SD3-medium; SD3.5 adds RMSNorm on queries and keys. Outputs and
gradients of the inputs are compared first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.domains.models.mmdit import MMDiTBlock, MMDiTConfig, Stream
from benchmarks.method import Row, in_turns, largest, parser_of, row, write_results

HEADS = 4


class Ours(nn.Module):
    """A stack of this project's blocks."""

    def __init__(self, width: int, depth: int, qk_norm: bool) -> None:
        super().__init__()
        config = MMDiTConfig(width, 1, HEADS, qk_norm=qk_norm, bias=True, tanh_gelu=True)
        self.blocks = nn.ModuleList(MMDiTBlock(config, context_only=(1,) * (i == depth - 1)) for i in range(depth))

    def forward(self, image: Tensor, text: Tensor, conditioning: Tensor) -> Tensor:
        conditioning, tokens = nn.functional.silu(conditioning), [image, text]
        for block in self.blocks:
            tokens = block(tokens, conditioning, None)
        return tokens[0]


class Theirs(nn.Module):
    """The same stack of diffusers' blocks."""

    def __init__(self, width: int, depth: int, qk_norm: bool) -> None:
        from diffusers.models.attention import JointTransformerBlock

        super().__init__()
        norm = "rms_norm" if qk_norm else None
        self.blocks = nn.ModuleList(
            JointTransformerBlock(width, HEADS, width // HEADS, i == depth - 1, norm) for i in range(depth)
        )

    def forward(self, image: Tensor, text: Tensor, conditioning: Tensor) -> Tensor:
        for block in self.blocks:
            text, image = block(image, text, conditioning)
        return image


def copy_linear(target: nn.Linear, *sources: nn.Linear) -> None:
    """Copy several linear layers into one, in place, concatenated over the output features."""
    target.weight.copy_(torch.cat([source.weight for source in sources]))
    target.bias.copy_(torch.cat([source.bias for source in sources]))


def copy_stream(stream: Stream, layers: dict[str, Any], modulation: nn.Linear, ffn: Any) -> None:
    """Copy one modality of diffusers' block into ours; `layers` has the keys q, k, v, out, norm_q and norm_k."""
    copy_linear(stream.modulation.linear, modulation)
    if stream.out is None or stream.ffn is None:  # diffusers' AdaLayerNormContinuous has scale before shift
        for parameter in stream.modulation.linear.parameters():
            parameter.copy_(parameter.roll(parameter.shape[0] // 2, 0))
        copy_linear(stream.qkv, layers["k"], layers["v"])
    else:
        copy_linear(stream.qkv, layers["q"], layers["k"], layers["v"])
        copy_linear(stream.out, layers["out"])
        copy_linear(stream.ffn.expand, ffn.net[0].proj)
        copy_linear(stream.ffn.project, ffn.net[2])
    for norm, source in ((stream.q_norm, layers["norm_q"]), (stream.k_norm, layers["norm_k"])):
        if norm is not None:
            norm.load_state_dict(source.state_dict())


@torch.no_grad()
def copy_weights(ours: Ours, theirs: Theirs) -> None:
    """Copy all weights of diffusers' blocks into ours."""
    for mine, other in zip(ours.blocks, theirs.blocks, strict=True):
        block: Any = other
        streams: Any = mine.streams
        a = block.attn
        layers = {"q": a.to_q, "k": a.to_k, "v": a.to_v, "out": a.to_out[0], "norm_q": a.norm_q, "norm_k": a.norm_k}
        copy_stream(streams[0], layers, block.norm1.linear, block.ff)
        layers = {"q": a.add_q_proj, "k": a.add_k_proj, "v": a.add_v_proj, "out": getattr(a, "to_add_out", None)}
        layers |= {"norm_q": a.norm_added_q, "norm_k": a.norm_added_k}
        copy_stream(streams[1], layers, block.norm1_context.linear, block.ff_context)


class Counter(TorchDispatchMode):
    """Count the operators that reach torch's dispatcher below autograd, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def step_of(model: nn.Module, inputs: list[Tensor], weights: Tensor) -> Callable[[], list[Tensor]]:
    """Return a forward and backward that returns output and input gradients. It computes and drops those of weights."""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> list[Tensor]:
        output = model(*inputs)
        gradients = torch.autograd.grad(output, [*inputs, *parameters], weights, allow_unused=True)
        return [output, *(g for g in gradients[: len(inputs)] if g is not None)]

    return step


def measure(kind: str, qk_norm: bool, width: int, rounds: int, repeats: int) -> tuple[list[Row], dict[str, Any]]:
    """Compare results, operators and time of one kind of block; return rows and details."""
    torch.manual_seed(0)
    theirs, ours = Theirs(width, 4, qk_norm), Ours(width, 4, qk_norm)
    copy_weights(ours, theirs)
    shapes = ((2, 256, width), (2, 77, width), (2, width))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0])
    steps = {"ours": step_of(ours, inputs, weights), "diffusers": step_of(theirs, inputs, weights)}
    results, counts = {name: step() for name, step in steps.items()}, dict[str, int]()
    pairs = zip(results["ours"], results["diffusers"], strict=True)
    difference = largest(float(((a - b).norm() / b.norm()).detach()) for a, b in pairs)
    for name, step in steps.items():
        with Counter() as counter:
            step()
        counts[name] = counter.count
    times = in_turns(steps, rounds, repeats=repeats)
    fewer = "<= 0.70" if kind == "SD3" else None
    rows = [
        row("C2", f"{kind} block: relative difference to diffusers' with its weights", difference, target="<= 1e-5"),
        row("C2", f"{kind} block: operators over diffusers'", counts["ours"] / counts["diffusers"], target=fewer),
        row("C2", f"{kind} block: speed over diffusers'", times.ratios("diffusers", "ours"), "x", ">= 1", ">= 1.05"),
    ]
    return rows, {"operators": counts, **times.summary()}


def main() -> int:
    """Measure both kinds of block and write the rows. Returns 1 if a target is missed, else 0."""
    parser = parser_of(__doc__, rounds=11)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.repeats, options.width = 2, 1, 32
    torch.set_num_threads(1)
    rows: list[Row] = []
    details: dict[str, Any] = {}
    absent: dict[str, str] = {}
    if find_spec("diffusers") is None:
        absent["diffusers"] = "not installed; pip install diffusers"
    for name, qk_norm in () if absent else (("SD3", False), ("SD3.5", True)):
        kind_rows, details[name] = measure(name, qk_norm, options.width, options.rounds, options.repeats)
        rows += kind_rows
    return 0 if write_results(options.output, "C2: the MMDiT block", rows, details, absent) else 1


if __name__ == "__main__":
    sys.exit(main())
