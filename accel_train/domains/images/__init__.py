"""Pictures with captions: sources, buckets of shapes, caches of latents and prompts."""
