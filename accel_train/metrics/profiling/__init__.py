"""Time of training steps: profiles by torch's profiler (``--profile.steps``), and cheaper metrics of every run."""
