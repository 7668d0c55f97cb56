"""Finds the offline metrics that order policies as the live model does."""
