"""Commands of `accel-train`, each on finished runs or launch files."""
