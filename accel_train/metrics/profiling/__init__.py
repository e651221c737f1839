"""Where the time of a training step goes, from a trace of torch's profiler (``--profile.steps``)."""
