"""Runs for people to watch: ``accel-train monitor`` and ``accel-train report``, from the files of a run alone."""
