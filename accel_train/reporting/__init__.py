"""Reports of a training: its log lines, throughput, profile and watch over its steps."""
