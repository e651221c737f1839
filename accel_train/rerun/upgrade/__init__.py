"""``accel-train replay --upgrade``: the same steps in two environments, and the first operator whose result differs."""
