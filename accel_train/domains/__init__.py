"""What is trained: everything that knows a model, its data and its objective."""
