"""``accel-train run --anywhere``: one run on whatever devices there are, while they come and go."""
