"""Tensors of a simulation: fake ones without memory, and the casts of a GPU."""
