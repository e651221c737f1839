"""Push checkpoints to the Hub: queue, worker process, download, model card."""
