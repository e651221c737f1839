"""Training domains, each with its models, data and objectives."""
