"""Leave out the update of a step refused by the host, under any strategy."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn


def leave_out(accelerator: Accelerator, model: nn.Module, step: int) -> None:
    """Drop the gradient and let the optimizer's next step do nothing. Called on all ranks.

    Under ZeRO the engine has discarded the step already. Raises ``RuntimeError`` if it has not.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        engine: Any = model
        # The engine judges by itself, so make sure that it came to the same verdict.
        if engine.was_step_applied():
            raise RuntimeError(f"step {step + 1} is not finite, but DeepSpeed has stepped anyway")
        return
    model.zero_grad(set_to_none=True)
    # While it is False, Accelerate's optimizer silently skips its step, and the next window sets it again. Most
    # optimizers that find no gradient would do nothing either, but one of the user's own may count the step.
    accelerator.sync_gradients = False
    scaler: Any = accelerator.scaler
    if scaler is not None:
        scaler.update(float(scaler.get_scale()))  # permits the `unscale_` of the next step
