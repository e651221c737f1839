"""Recorded runs again: the same steps for a proof, or changed options on the same samples and noise."""
