"""Check of a dataset of pictures before it is trained on: what is in it, and what looks wrong."""
