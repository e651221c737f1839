"""What is trained on: sources, latents, the step-indexed sampler, the loader."""
