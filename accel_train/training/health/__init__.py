"""What happens to a step whose loss or gradient is not finite, or whose gradient is far larger than usual."""
