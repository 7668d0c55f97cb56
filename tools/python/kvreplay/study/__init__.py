"""The closed-loop study: `tools/study`."""
