"""Exports: verification of their files, and the layout of adapters in peft's format."""
