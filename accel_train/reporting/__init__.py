"""Reports of a training: log lines, throughput, memory, evaluations, and the watch over its steps."""
