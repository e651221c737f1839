"""Tensors of a simulation: without memory, and with the casts of a GPU."""
