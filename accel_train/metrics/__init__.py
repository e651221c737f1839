"""What a run reports: throughput, records, logs, pictures."""
