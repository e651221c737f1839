"""Causal language models of transformers: rows, chat templates, packing, perplexity, samples."""
