"""Pretrained diffusers pipelines: their families, inputs and adapters."""
