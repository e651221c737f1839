"""`accel-train drill`: faults injected into short runs of a recipe, and a save interval from their cost."""
