"""Processes of several hosts before they are connected: whether all have come, and whether all start the same run."""
