"""Processes that wait for each other: all must arrive with the same start, and the others hear when one leaves."""
