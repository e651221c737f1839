"""Pretrained pipelines of diffusers: their families, inputs and adapters."""
