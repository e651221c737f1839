"""Losses of single samples in training."""
