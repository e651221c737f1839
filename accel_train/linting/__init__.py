"""Rules about valid but rarely intended combinations of options, launch file, environment and host."""
