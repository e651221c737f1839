"""Rules about combinations of options, launch file, environment and host that start, and are rarely meant."""
