"""Texts in shards: an index instead of the rows, and latents by blocks."""
