"""Latents on disk, and the pictures and texts that sampling reads and writes."""
