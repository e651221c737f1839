"""Trackers, and how each takes pictures and texts of evaluations."""
