"""Tensors of this process that do not belong to the trained model."""

from __future__ import annotations

import gc

from torch import Tensor, nn

from accel_train.simulation.ledger import storage_of


def tensors_beside(model: nn.Module) -> list[Tensor]:
    """Return parameters and buffers of this process's other modules, such as an autoencoder. Runs a full ``gc``."""
    known = {id(module) for module in model.modules()}
    weights = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    # Modules may be in reference cycles, so that unused ones may still exist.
    gc.collect()
    tensors: list[Tensor] = []
    for module in gc.get_objects():
        # By type, not isinstance: asking a proxy object for its class may import modules or warn.
        if issubclass(type(module), nn.Module) and id(module) not in known:
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            tensors += [tensor for tensor in own if storage_of(tensor) not in weights]
    return tensors
