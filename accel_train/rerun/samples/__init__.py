"""Single samples of recorded runs: which one moved a step, a run without some, two models compared sample by sample."""
