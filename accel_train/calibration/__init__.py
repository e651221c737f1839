"""``accel-train calibrate``: rates of the present machine, measured, for the step time of a plan."""
