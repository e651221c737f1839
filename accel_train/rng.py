"""Random draws that are a function of (seed, stream, step, sample) and of nothing else.

No generator, no state: a 64-bit key is hashed from the four, and element j of a draw is the j-th output of
SplitMix64 (Steele, Lea, Flood 2014) started at that key. The process count, the order and the cut of the
batch do not enter, and the integers are the same on every device. `uniform` is exact as well; `normal` goes
through log, sqrt, sin and cos and so agrees between devices to the last bits only.

A stream names one use ("text/mask", "latent/noise"). Two draws with the same key are the same numbers, on
purpose: give every use its own stream.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from accel_train.config import UsageError

_MASK = (1 << 64) - 1
_DRAW = 0x9E3779B97F4A7C15  # SplitMix64's increment between the draws of one key
_DERIVE = 0xD1342543DE82EF95  # another odd constant, so that no derived key equals a draw of its parent
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # Stafford's variant 13 of the MurmurHash3 finalizer


def key(seed: int, stream: str, step: int) -> int:
    """Signed 64-bit key of one (seed, stream, step); `step` may be an epoch or any other counter."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed}: must be from 0 to 4294967295 (2**32 - 1). Choose one in that range.")
    return _signed(_derive(_derive(_derive(0, seed), _stream_number(stream)), step))


def sample_keys(seed: int, stream: str, step: int, occurrence: Tensor) -> Tensor:
    """Keys of the samples `occurrence` (any shape, int64) at `step`: same shape, same device."""
    start = _signed((key(seed, stream, step) + _DERIVE) & _MASK)
    return _mix((occurrence * _signed(_DERIVE)).add_(start))


def uniform(keys: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """float32 in [0, 1), multiples of 2**-24, shape keys.shape + shape.

    A larger `shape` begins with the elements of a smaller one.
    """
    # The last xor-shift of the hash leaves the top 31 bits as they are, so it is left out here.
    bits = _shift_(_mix(_counters(keys, math.prod(shape)), last=False), 40)
    return bits.to(torch.float32).mul_(2.0**-24).reshape(*keys.shape, *shape)


def normal(keys: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Standard normal float32, shape keys.shape + shape. Always finite; |x| <= 7.54.

    Box-Muller: one hash gives the radius 40 bits and the angle 24, for two numbers. 40 bits make the tail
    right (24 would end it at 5.8); the middle of each interval is taken, so that zero does not occur.
    """
    count = math.prod(shape)
    bits = _mix(_counters(keys, (count + 1) // 2))
    angle = (bits & 0xFFFFFF).to(torch.float32).mul_(2.0 * math.pi * 2.0**-24)
    # Odd integers of 41 bits: (k + 1/2) * 2**-40. Rounding to float32 may give 1, never 0.
    radius = _shift_(bits, 24).mul_(2).add_(1).to(torch.float32).mul_(2.0**-41).log_().mul_(-2.0).sqrt_()
    pairs = torch.view_as_real(torch.polar(radius, angle)).flatten(-2)
    return pairs[..., :count].reshape(*keys.shape, *shape)


def categorical(keys: Tensor, probabilities: Tensor) -> Tensor:
    """Index drawn for each key (B,) from weights (K,) or (B, K): (B,) int64. Weights need not sum to one.

    A weight of zero is never drawn. Weights on the CPU are checked; elsewhere that would wait for the device.
    """
    weights = probabilities.to(torch.float64)
    total = weights.sum(-1)
    if weights.device.type == "cpu" and not bool((~(weights < 0).any(-1) & (total > 0) & total.isfinite()).all()):
        raise UsageError(
            f"weights={weights.tolist() if weights.numel() <= 32 else '(...)'}: weights must be 0 or more, "
            "finite, and not all 0. Give at least one a positive weight."
        )
    bits = _shift_(_mix(_counters(keys, 1)), 24)
    return inverse_cdf(bits.to(torch.float64).mul_(2.0**-40).squeeze(-1), weights)


def inverse_cdf(position: Tensor, weights: Tensor) -> Tensor:
    """First index whose cumulated weight exceeds position * total, position in [0, 1): shape of `position`.

    `weights` (..., K), broadcast against position (...); an index of weight zero is never returned.
    """
    cumulated = weights.cumsum(-1)
    above = cumulated > (position.to(weights.dtype) * cumulated[..., -1]).unsqueeze(-1)
    # A parallel scan may round two equal sums apart: the weight itself decides what can be drawn.
    return (above & (weights > 0)).to(torch.uint8).argmax(-1)


def permute(index: Tensor, length: int, key: int) -> Tensor:
    """Where the random bijection of range(length) named by `key` sends each index (int64); no table.

    A Feistel network over the next power of two; values that fall outside `length` walk on along their cycle
    (Black and Rogaway 2002), twice on average at worst. Waits for the device: meant for the CPU.
    """
    if not 1 <= length <= 2**62:
        raise UsageError(f"length={length}: must be from 1 to 2**62. Is the dataset empty?")
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < length:
        low, high = int(index.min()), int(index.max())
        raise UsageError(f"index from {low} to {high}: must be from 0 to {length - 1}. Give the length it has.")
    bits = (length - 1).bit_length()
    # Few bits mix slowly: with 8 rounds the 120 orders of 5 elements are visibly not equally likely.
    rounds = [_signed(_derive(key & _MASK, i)) for i in range(6 if bits > 10 else 12)]
    result = _feistel(index.flatten(), bits, rounds)
    outside = (result >= length).nonzero().squeeze(-1)
    while outside.numel():
        walked = _feistel(result[outside], bits, rounds)
        result[outside] = walked
        outside = outside[walked >= length]
    return result.reshape(index.shape)


def host_uniform(seed: int, stream: str, step: int) -> float:
    """`uniform` of `key(seed, stream, step)` as a Python float: the same bits, without a tensor."""
    return (_mix_int((key(seed, stream, step) + _DRAW) & _MASK) >> 40) * 2.0**-24


def host_choice(seed: int, stream: str, step: int, weights: Sequence[float]) -> int:
    """`categorical` of `key(seed, stream, step)`: an index into `weights`, the same on every rank."""
    keys = torch.tensor([key(seed, stream, step)], dtype=torch.int64, device="cpu")
    return int(categorical(keys, torch.tensor(weights, dtype=torch.float64, device="cpu")))


@lru_cache(maxsize=256)
def _stream_number(stream: str) -> int:
    # Python's own hash of a string differs from process to process.
    return int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")


def _derive(parent: int, value: int) -> int:
    return _mix_int((parent + (value + 1) * _DERIVE) & _MASK)


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MULTIPLIERS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIERS[1]) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


def _counters(keys: Tensor, count: int) -> Tensor:
    """State of each key before its draws 0..count-1: (*keys.shape, count)."""
    first = _signed(_DRAW)
    steps = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device).mul_(first)
    return keys.unsqueeze(-1) + steps


def _shift_(z: Tensor, by: int) -> Tensor:
    """Logical right shift in place: torch's own carries the sign of an int64 along."""
    return z.bitwise_right_shift_(by).bitwise_and_(_MASK >> by)


def _mix(z: Tensor, last: bool = True) -> Tensor:
    """`_mix_int` in place. Multiplication of int64 wraps, as that of uint64 does, with the same bits."""
    scratch = torch.empty_like(z)
    for by, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        torch.bitwise_right_shift(z, by, out=scratch)
        z.bitwise_xor_(scratch.bitwise_and_(_MASK >> by)).mul_(_signed(multiplier))
    if last:
        torch.bitwise_right_shift(z, 31, out=scratch)
        z.bitwise_xor_(scratch.bitwise_and_(_MASK >> 31))
    return z


def _feistel(index: Tensor, bits: int, round_keys: Sequence[int]) -> Tensor:
    """Bijection of range(2**bits): each half in turn is xored with a hash of the other."""
    low_bits = bits // 2
    halves = [index >> low_bits, index & ((1 << low_bits) - 1)]
    widths = [bits - low_bits, low_bits]
    for i, round_key in enumerate(round_keys):
        width = widths[i % 2]
        if width:
            mixed = _mix(halves[1 - i % 2] + round_key, last=False)
            halves[i % 2] = halves[i % 2] ^ _shift_(mixed, 64 - width)
    return (halves[0] << low_bits) | halves[1]
