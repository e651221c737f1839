"""What a checkpoint holds beside its tensors: small JSON files, and what goes into them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_train.checkpoints import snapshot
from accel_train.checkpoints.policy import CheckpointConfig
from accel_train.training.ema import Ema
from accel_train.training.shards import Shards


def collections(
    shards: Shards, average: Ema | None, config: CheckpointConfig, state: Mapping[str, Sequence[str]]
) -> list[snapshot.Collection]:
    """The weights, the EMA, the optimizer's ``state`` (kind -> parameters), exact copies of what is rounded."""
    precision = config.save_precision
    found = [snapshot.Collection("model", shards.master, precision)]
    if average is not None:
        found.append(snapshot.Collection("ema", average.shards.__getitem__, precision))
    found += [_optimizer_state(shards, key, names) for key, names in state.items()]
    if precision != "fp32" and config.save_state:
        found.append(snapshot.Collection("optimizer/master", shards.master, spread=True))
        if average is not None:
            found.append(snapshot.Collection("optimizer/master_ema", average.shards.__getitem__, spread=True))
    return found


def _optimizer_state(shards: Shards, key: str, names: Sequence[str]) -> snapshot.Collection:
    return snapshot.Collection(f"optimizer/{key}", lambda name: shards.state(name, key), spread=True, names=names)


def indices(planned: snapshot.Plan) -> dict[str, Any]:
    """File name -> index in the Hub's own format, for weights and EMA where they take several files."""
    found: dict[str, Any] = {}
    for stem in ("model", "ema"):
        files = planned.files(stem)
        if len(set(files.values())) > 1:
            total = sum(t.bytes for t in planned.tensors if t.file in set(files.values()))
            found[f"{stem}.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": files}
    return found


def state_index(planned: snapshot.Plan, step: int) -> dict[str, Any]:
    """Which file holds which tensor of the optimizer state."""
    stems = dict.fromkeys(t.file.removesuffix(".safetensors").split("-")[0] for t in planned.tensors)
    state = {s.removeprefix("optimizer/"): planned.files(s) for s in stems if s.startswith("optimizer/")}
    return {"step": step, "state": state}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that JSON can hold."""
    return {k: float(v) for k, v in metrics.items() if math.isfinite(v)}


def random_state() -> dict[str, Any]:
    """torch's and Python's generators of this rank, as JSON. Training itself draws from neither."""
    version, internal, gauss = random.getstate()
    mine = {"torch": torch.get_rng_state().numpy().tobytes().hex(), "python": [version, list(internal), gauss]}
    if torch.cuda.is_available():
        mine["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return mine
