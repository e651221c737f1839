"""Processes that others wait for: whether all come with the same start, and what is said when one leaves."""
