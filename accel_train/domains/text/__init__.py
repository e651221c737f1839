"""Text and latents: corpus, encoders, modes, evaluation."""
