"""Additions to the loss of a picture: pictures of the prior beside it, and masks within it."""
