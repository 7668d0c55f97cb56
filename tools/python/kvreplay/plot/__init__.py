"""Figures of a finished run: one file a kind, each with `draw(choice)`, which returns a figure and its numbers."""
