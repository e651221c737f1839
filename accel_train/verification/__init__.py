"""`accel-train verify`: the gradient contract, proven on a recipe by short runs of it."""
