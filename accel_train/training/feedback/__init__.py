"""What the losses of a run change in its later steps: the balance of the loss terms, and the learning rate."""
