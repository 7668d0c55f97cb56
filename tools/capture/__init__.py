"""Capture: runs a decoder model once over a prompt and its continuation, and streams Q, K and V into a trace."""
