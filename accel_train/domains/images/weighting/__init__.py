"""What the loss counts beside and within a picture: pictures of the prior, and masks."""
