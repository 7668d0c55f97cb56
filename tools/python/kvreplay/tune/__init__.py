"""`kvreplay tune`: policies fitted on some traces, and what of that holds on others."""
