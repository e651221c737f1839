"""DeepSpeed's engine in a simulation: its own code on fake tensors, and where it keeps its tensors."""
