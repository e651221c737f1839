"""``accel-train simulate``: a recipe's own step on fake tensors, at any number of processes, and its memory."""
