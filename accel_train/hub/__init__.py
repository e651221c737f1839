"""Checkpoints on the Hub: push, queue, worker process, download, model card."""
