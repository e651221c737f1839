"""Language models as files that need torch alone."""
