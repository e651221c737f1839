"""Adapters on the text encoders of a pipeline, trained together with those of its denoiser."""
