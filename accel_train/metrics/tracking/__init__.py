"""Trackers, and the pictures and texts of evaluations that they get."""
