"""The mathematics of the objectives. Plain torch: nothing here knows of processes or files."""
