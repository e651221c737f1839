"""Diffusion of continuous latents and of masked text. Plain torch."""
