"""Latents: on disk, one file for texts in memory or blocks for shards; and pictures given, drawn and asked for."""
