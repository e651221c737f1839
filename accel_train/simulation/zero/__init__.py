"""DeepSpeed's engine in a simulation: its own code on fake tensors, and its tensors by category."""
