"""Fields on the disk, generated or given, and their normalised rows."""
