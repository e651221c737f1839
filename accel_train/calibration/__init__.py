"""``accel-train calibrate``: measure the rates of this machine, from which a plan derives its step time."""
