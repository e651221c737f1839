"""Partial differential equations: data, model, objective and metrics."""
