"""Steps with a loss or gradient that is not finite, or a gradient far larger than usual."""
