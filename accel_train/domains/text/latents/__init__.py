"""Latents of texts on disk: one file for texts in memory, blocks for shards."""
