"""Optimizers that torch lacks, or has with more work around their kernels."""
