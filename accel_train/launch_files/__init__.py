"""Launch files: what the machine was asked for. Files only, no torch."""
