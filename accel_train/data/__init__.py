"""Data loading for any dataset: step-indexed samplers, the loader, buckets, held-out batches, cached folders."""
