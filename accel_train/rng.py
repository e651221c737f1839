"""Stateless random draws: functions of (seed, stream, step, sample) alone.

The four are hashed to a 64-bit key. Element j of a draw is the j-th output of SplitMix64 (Steele, Lea, Flood 2014)
started at this key. Draws do not depend on the process count, the order or the sharding of the batch. Integers and
`uniform` are identical on every device. `normal` uses log, sqrt, sin and cos, and agrees between devices except for
the last bits.

A stream names one use ("text/mask", "latent/noise"). Equal keys give equal numbers by design, so give every use its
own stream.
"""

import contextlib
import hashlib
import math
import random
from collections.abc import Generator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from accel_train.config import UsageError

_MASK = (1 << 64) - 1
# SplitMix64's increment between the draws of one key.
_DRAW = 0x9E3779B97F4A7C15
# Another odd constant, so that no derived key equals a draw of its parent.
_DERIVE = 0xD1342543DE82EF95
# Stafford's variant 13 of the MurmurHash3 finalizer.
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def key(seed: int, stream: str, step: int) -> int:
    """Return the signed 64-bit key of (seed, stream, step). `step` may be an epoch or any other counter."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed}: must be from 0 to 4294967295 (2**32 - 1). Choose one in that range.")
    seed_key = _derive(0, seed)
    stream_key = _derive(seed_key, _stream_number(stream))
    return _signed(_derive(stream_key, step))


def sample_keys(seed: int, stream: str, step: int, occurrence: Tensor) -> Tensor:
    """Return the keys of samples `occurrence` (any shape, int64) at `step`: same shape, same device."""
    parent = key(seed, stream, step)
    # `_derive` of each occurrence, with int64 tensors that wrap like uint64.
    first = _signed((parent + _DERIVE) & _MASK)
    return _mix((occurrence * _signed(_DERIVE)).add_(first))


def uniform(keys: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Return float32 in [0, 1), multiples of 2**-24, of shape keys.shape + shape.

    A larger `shape` begins with the elements of a smaller one.
    """
    # The last xor-shift of the hash leaves the top 31 bits unchanged, so it is left out.
    hashed = _mix(_counters(keys, math.prod(shape)), last=False)
    bits = _shift_(hashed, 40)  # 24 bits
    return bits.to(torch.float32).mul_(2.0**-24).reshape(*keys.shape, *shape)


def normal(keys: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Return standard normal float32 of shape keys.shape + shape. Always finite, |x| <= 7.54.

    Box-Muller: one hash gives 40 bits for the radius and 24 for the angle of two numbers. 40 bits make the tail
    right (with 24 it would end at 5.8). The radius uses the middle of each interval, so zero does not occur.
    """
    count = math.prod(shape)
    bits = _mix(_counters(keys, (count + 1) // 2))
    low_bits = bits & 0xFFFFFF  # 24 bits
    angle = low_bits.to(torch.float32).mul_(2.0 * math.pi * 2.0**-24)
    # Odd integers of 41 bits: (k + 1/2) * 2**-40. Rounding to float32 may give 1, never 0.
    odd = _shift_(bits, 23).bitwise_or_(1)
    uniform = odd.to(torch.float32).mul_(2.0**-41)
    radius = uniform.log_().mul_(-2.0).sqrt_()
    pairs = torch.view_as_real(torch.polar(radius, angle)).flatten(-2)  # (..., count or count + 1)
    return pairs[..., :count].reshape(*keys.shape, *shape)


def categorical(keys: Tensor, probabilities: Tensor) -> Tensor:
    """Draw an index for each key (B,) from weights (K,) or (B, K): (B,) int64. Weights need not sum to one.

    A weight of zero is never drawn. Weights are checked on the CPU only, because elsewhere the check would wait for
    the device.
    """
    weights = probabilities.to(torch.float64)
    if weights.device.type == "cpu":
        _check_weights(weights)
    bits = _shift_(_mix(_counters(keys, 1)), 24)  # 40 bits
    position = bits.to(torch.float64).mul_(2.0**-40).squeeze(-1)
    return inverse_cdf(position, weights)


def _check_weights(weights: Tensor) -> None:
    total = weights.sum(-1)
    has_negative = (weights < 0).any(-1)
    valid = ~has_negative & (total > 0) & total.isfinite()
    if bool(valid.all()):
        return
    shown = weights.tolist() if weights.numel() <= 32 else "(...)"
    raise UsageError(
        f"weights={shown}: weights must be 0 or more, finite, and not all 0. Give at least one a positive weight."
    )


def inverse_cdf(position: Tensor, weights: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds position * total, in the shape of `position`.

    `position` in [0, 1) broadcasts against `weights` (..., K). Indices of weight zero are never returned.
    """
    cumulative = weights.cumsum(-1)
    # Times the computed sum: with 1 in its place, rounding could leave no index above the threshold.
    threshold = position.to(weights.dtype) * cumulative[..., -1]
    exceeds = cumulative > threshold.unsqueeze(-1)
    # A parallel scan may round two equal sums apart, so the weight itself decides if an index can be drawn.
    drawable = exceeds & (weights > 0)
    return drawable.to(torch.uint8).argmax(-1)


def permute(index: Tensor, length: int, key: int) -> Tensor:
    """Map each index (int64) by the random bijection of range(length) selected by `key`. Needs no table.

    A Feistel network over the next power of two. Values outside `length` walk on along their cycle (Black and
    Rogaway 2002), twice on average at worst. Waits for the device, so it is meant for the CPU.
    """
    if not 1 <= length <= 2**62:
        raise UsageError(f"length={length}: must be from 1 to 2**62. Is the dataset empty?")
    if index.numel():
        low = int(index.min())
        high = int(index.max())
        if low < 0 or high >= length:
            raise UsageError(f"index from {low} to {high}: must be from 0 to {length - 1}. Give the length it has.")
    bits = (length - 1).bit_length()
    # Few bits mix slowly: with 8 rounds the 120 orders of 5 elements are visibly not equally likely.
    rounds = 6 if bits > 10 else 12
    round_keys = [_signed(_derive(key & _MASK, i)) for i in range(rounds)]
    result = _feistel(index.flatten(), bits, round_keys)
    outside = (result >= length).nonzero().squeeze(-1)
    while outside.numel():
        walked = _feistel(result[outside], bits, round_keys)
        result[outside] = walked
        outside = outside[walked >= length]
    return result.reshape(index.shape)


def host_uniform(seed: int, stream: str, step: int) -> float:
    """Return `uniform` of `key(seed, stream, step)` as a Python float: the same bits, without a tensor."""
    first = (key(seed, stream, step) + _DRAW) & _MASK
    bits = _mix_int(first) >> 40  # 24 bits
    return bits * 2.0**-24


def host_choice(seed: int, stream: str, step: int, weights: Sequence[float]) -> int:
    """Return `categorical` of `key(seed, stream, step)`: an index into `weights`, the same on every rank."""
    hashed = key(seed, stream, step)
    keys = torch.tensor([hashed], dtype=torch.int64, device="cpu")
    probabilities = torch.tensor(weights, dtype=torch.float64, device="cpu")
    return int(categorical(keys, probabilities))


@lru_cache(maxsize=256)
def _stream_number(stream: str) -> int:
    # Python's own hash of a string differs from process to process.
    digest = hashlib.blake2b(stream.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _derive(parent: int, value: int) -> int:
    """Return the unsigned key of child `value` of a parent key."""
    # Not value alone: the hash of 0 is 0, which seed 0 would have for its key.
    return _mix_int((parent + (value + 1) * _DERIVE) & _MASK)


def _mix_int(z: int) -> int:
    """Hash 64 bits with the output function of SplitMix64."""
    z = ((z ^ (z >> 30)) * _MULTIPLIERS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIERS[1]) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    """Reinterpret a uint64 as int64, the integer type of tensors."""
    if z >> 63:
        return z - (1 << 64)
    return z


def _counters(keys: Tensor, count: int) -> Tensor:
    """Return the state of each key for its draws 0 to count - 1: (*keys.shape, count)."""
    increments = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device)
    return keys.unsqueeze(-1) + increments.mul_(_signed(_DRAW))


def _shift_(z: Tensor, by: int) -> Tensor:
    """Shift right logically, in place. torch's own shift of int64 extends the sign."""
    return z.bitwise_right_shift_(by).bitwise_and_(_MASK >> by)


def _mix(z: Tensor, last: bool = True) -> Tensor:
    """Apply `_mix_int` in place. Multiplication of int64 wraps to the same bits as of uint64."""
    scratch = torch.empty_like(z)
    for by, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        torch.bitwise_right_shift(z, by, out=scratch)
        z.bitwise_xor_(scratch.bitwise_and_(_MASK >> by)).mul_(_signed(multiplier))
    if last:
        torch.bitwise_right_shift(z, 31, out=scratch)
        z.bitwise_xor_(scratch.bitwise_and_(_MASK >> 31))
    return z


def _feistel(index: Tensor, bits: int, round_keys: Sequence[int]) -> Tensor:
    """Apply a bijection of range(2**bits): each half in turn is xored with a hash of the other."""
    low_bits = bits // 2
    halves = [index >> low_bits, index & ((1 << low_bits) - 1)]
    widths = [bits - low_bits, low_bits]
    for number, round_key in enumerate(round_keys):
        changed = number % 2
        other = 1 - changed
        width = widths[changed]
        # With one bit in all, the lower half is empty.
        if width:
            mixed = _mix(halves[other] + round_key, last=False)
            halves[changed] = halves[changed] ^ _shift_(mixed, 64 - width)
    return (halves[0] << low_bits) | halves[1]


def seed_generators(key: int) -> None:
    """Seed the global generators of Python, numpy and torch, in about 14 µs."""
    random.seed(key)
    # numpy takes seeds of 32 bits.
    np.random.seed(key & 0xFFFFFFFF)
    # torch.manual_seed would also seed every accelerator, which takes ten times as long.
    torch.default_generator.manual_seed(key)


@contextlib.contextmanager
def preserve_random_states(*, of_device: bool = False) -> Generator[None, None, None]:
    """Restore the states of the global generators. Takes about 0.15 ms, so use it once per micro-batch.

    ``of_device``: that of the present CUDA device too, which may wait for it.
    """
    device_state: Tensor | None = None
    if of_device and torch.cuda.is_initialized():
        device_state = torch.cuda.get_rng_state()
    python_state = random.getstate()
    # The legacy form warns about any bit generator other than MT19937.
    numpy_state = np.random.get_state(legacy=False)
    torch_state = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
