"""``accel-train monitor`` and ``accel-train report``: views of runs for people, from the files of a run alone."""
