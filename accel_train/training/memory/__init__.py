"""Memory of a training by what it is for."""
