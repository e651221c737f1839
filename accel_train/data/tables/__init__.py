"""Rows on disk: shards larger than memory, their blocks and order, what a run has seen; sources of texts."""
