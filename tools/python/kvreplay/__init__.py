"""kvreplay in Python: capture of traces from language models, reading of traces, pictures of results."""

__version__ = "0.1.0"
