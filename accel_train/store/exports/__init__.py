"""Exports: their files against their hashes, and those of adapters as peft writes them."""
