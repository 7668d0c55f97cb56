"""Policies against a baseline over traces: paired differences, their intervals, and tests of them."""
