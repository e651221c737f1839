"""Attention kernels: the table, the choice, the proof; for our models and those of other libraries."""
