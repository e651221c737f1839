"""Captioned pictures as rows of texts with latents, for `recipes/mmdit.py`."""
