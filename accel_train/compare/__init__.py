"""`accel-train compare`: A/B runs of configs, with gates."""
