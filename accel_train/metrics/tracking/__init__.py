"""Pictures and texts of evaluations, for the trackers."""
