"""Single samples of recorded runs: which one moved a step, and a run without some."""
