"""Memory for training adapters on a pipeline, estimated before anything is loaded."""
