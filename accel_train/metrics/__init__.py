"""Throughput, records, logs, trackers and curves of a run."""
