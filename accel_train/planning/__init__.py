"""``accel-train plan``: the launch file, micro-batch and activation checkpointing with which a recipe fits its GPUs."""
