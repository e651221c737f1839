"""Tokens of packed rows on the disk: their files, and the cache that makes them."""
