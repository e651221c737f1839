"""One optimizer step: accumulation, optimizers, schedules, moving averages."""
