"""The page of ``accel-train report``."""
