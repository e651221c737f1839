"""`accel-train verify`: short runs of a recipe that prove the gradient contract for it."""
