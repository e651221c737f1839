"""An option that another leaves without effect is refused, and with the remedy it is accepted."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest

from accel_train.config import UsageError
from accel_train.options.loading import load_config
from recipes import causal_lm, mmdit, pde
from tests.options.test_options import PRESETS

DEFAULTS = {mmdit: "demo", causal_lm: "causal_lm_tune", pde: "pde_demo"}


class Row(NamedTuple):
    recipe: ModuleType
    flags: str
    says: str
    remedy: str


ROWS = [
    Row(
        mmdit,
        "--checkpoints.keep_last 0 --checkpoints.keep_every 5",
        r"keep_every: 5: .*keep_last: 0, which keeps every",
        "--checkpoints.keep_last 1",
    ),
    Row(
        mmdit,
        "--checkpoints.keep_last 0 --checkpoints.keep_window_epochs 2",
        r"keep_window_epochs: 2\.0: ",
        "--checkpoints.keep_window_epochs 0",
    ),
    Row(
        mmdit,
        "--checkpoints.keep_state_last 1 --checkpoints.no_save_state",
        r"keep_state_last: 1: .*save_state: false",
        "--checkpoints.save_state",
    ),
    Row(mmdit, "--checkpoints.keep_state_last 3", r"give less than 3, keep more", "--checkpoints.keep_state_last 2"),
    Row(mmdit, "--checkpoints.keep_state_last 3", r"keep_state_last: 3: .*keep_last: 3", "--checkpoints.keep_every 9"),
    Row(mmdit, "--checkpoints.best_mode max", r"best_mode: max: .*best_metric", "--checkpoints.best_metric l2t_nll"),
    Row(
        mmdit,
        "--hub.repo_id me/model --hub.push last --hub.push_every 5",
        r"push_every: 5: .*push: last",
        "--hub.push every",
    ),
    Row(mmdit, "--health.max_skipped 3", r"max_skipped: 3: .*stop, which skips no", "--health.non_finite skip"),
    Row(mmdit, "--health.max_rollbacks 1", r"max_rollbacks: 1: .*never goes", "--health.non_finite rollback"),
    Row(mmdit, "--health.spike_window 50", r"spike_window: 50: nothing looks", "--health.spike_factor 10"),
    Row(
        mmdit,
        "--schedule.kind cosine_restarts --schedule.cycles 1 --schedule.cycle_multiplier 2",
        r"cycle_multiplier=2: .*no second cycle",
        "--schedule.cycles 2",
    ),
    Row(
        mmdit,
        "--modes.weights 1 0 0 --modes.latent_weight 1 --modes.conditioning_dropout 0.2",
        r"conditioning_dropout 0\.2: has no effect",
        "--modes.weights 1 0 1",
    ),
    Row(
        mmdit,
        "--modes.weights 0 1 0 --modes.latent_weight 2",
        r"latent_weight 2: has no effect with modes\.weights 0 1 0",
        "--modes.weights 0 1 1",
    ),
    Row(
        causal_lm,
        "--model.source me/base --data.vocab_size 300",
        r"vocab_size 300 .*me/base', whose tokenizer",
        "--data.tokenizer trained",
    ),
    Row(
        causal_lm,
        "--data.heldout_path a.txt --data.heldout_fraction 0.2",
        r"fraction 0\.2 .*a\.txt.*default 0\.04",
        "--data.heldout_fraction 0",
    ),
    Row(
        pde,
        "--objective.inverse_every 4 --objective.inverse_weight 0",
        r"inverse_every 4: .*leaves the inverse terms",
        "--objective.inverse_weight 1",
    ),
    Row(
        pde,
        "--evaluation.conditioning.beam 4 --evaluation.conditioning.candidates 1",
        r"beam 4: .*candidates 1, the plain step",
        "--evaluation.conditioning.candidates 2",
    ),
]


def load(recipe: ModuleType, flags: str) -> None:
    load_config(vars(recipe)["Config"], flags.split(), presets=PRESETS, default_preset=DEFAULTS[recipe])


@pytest.mark.parametrize("row", ROWS, ids=[row.remedy.replace("--", "") for row in ROWS])
def test_it_is_refused_without_its_remedy(row: Row) -> None:
    with pytest.raises(UsageError, match=row.says):
        load(row.recipe, row.flags)
    load(row.recipe, f"{row.flags} {row.remedy}")
