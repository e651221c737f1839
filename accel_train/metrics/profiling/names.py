"""Names of this package's own spans in a trace."""

from __future__ import annotations

STEP = "accel_train: step"
DATA_WAIT = "accel_train: data wait"
PAUSE = "accel_train: pause"
"""An evaluation or a save, which is not training."""
