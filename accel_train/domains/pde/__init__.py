"""Partial differential equations: data, model, objective, figures."""
