"""Writing with a trained model: the tokens after a prompt, where they end, and what `accel-train sample` asks."""
