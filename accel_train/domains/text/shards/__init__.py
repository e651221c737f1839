"""Texts in shards: an index in memory instead of the rows, and latents by block."""
