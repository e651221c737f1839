"""Attention kernels, compilation, float8 and activation checkpointing: options for speed and memory."""
