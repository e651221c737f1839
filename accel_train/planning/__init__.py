"""``accel-train plan``: fit a recipe to given GPUs by launch file, micro-batch and activation checkpointing."""
