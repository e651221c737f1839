"""`accel-train better`: a paired test of two checkpoints on the same held-out samples."""
