"""``accel-train simulate``: run a recipe's own step on fake tensors, at any number of processes, and count it."""
