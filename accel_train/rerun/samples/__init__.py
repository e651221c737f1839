"""Single samples of recorded runs: find those that stand out in a step, and train again without some."""
