"""Fields of training lines beyond totals: losses by sample and time, norms by part of the model."""
