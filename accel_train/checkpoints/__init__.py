"""Checkpoints that are complete, verified and readable under any strategy."""
