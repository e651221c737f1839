"""What makes a model faster or smaller: attention kernels, compilation, float8, activation checkpointing."""
