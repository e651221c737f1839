"""Complete, verified checkpoints, readable under any strategy."""
