"""Picture files as upright squares, and squares as latents: the same in training and in sampling."""
