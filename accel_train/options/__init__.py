"""The options of a run: read from a preset or YAML file and flags, checked, explained by ``--help``."""
