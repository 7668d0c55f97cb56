"""Replayed sets in the live model: what a model predicts when it sees only the kept tokens."""
