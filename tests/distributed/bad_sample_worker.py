"""recipes/mmdit.py, with samples of the training split that make a loss NaN: ``bad_sample_worker.py 7,19 demo``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from accel_train.runtime.exiting import run_main
from accel_train.training.accumulation import Batch
from recipes import mmdit


def main(argv: Sequence[str]) -> int:
    bad = [int(sample) for sample in argv[0].split(",") if sample]
    loss_sums = mmdit.loss_sums

    def spoiled(config: mmdit.Config, model: nn.Module, inputs: Batch, mask_id: int) -> dict[str, Tensor]:
        sums = loss_sums(config, model, inputs, mask_id)
        is_bad = torch.isin(inputs["sample"], torch.tensor(bad, dtype=torch.int64))
        return {name: value.masked_fill(is_bad, float("nan")) for name, value in sums.items()}

    mmdit.loss_sums = spoiled
    return mmdit.main(argv[1:])


if __name__ == "__main__":
    run_main(main)
