"""Fields on disk, generated or brought by the user, and their normalised rows."""
