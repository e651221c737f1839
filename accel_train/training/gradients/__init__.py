"""Gradients of a step: when they are reduced."""
