"""One optimizer step: accumulation, optimizers, schedules, EMA."""
