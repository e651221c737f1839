"""The residual of a prediction: the network that corrects it, and its diffusion."""
