"""Memory of training adapters on a pipeline, told before anything is loaded."""
