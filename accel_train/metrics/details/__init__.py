"""What a training line says beyond totals: losses by sample and time, norms by part of the model."""
