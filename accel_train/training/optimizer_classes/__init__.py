"""Optimizers: torch's fused AdamW with less work around its kernel, Muon, and states in 8 bits or in host memory."""
