"""Rows of a language model's data: their sources, their forms, and remedies for rows of no form."""
