"""Policies in `model.generate` of transformers."""

from kvreplay.transformers.cache import ReplayCache

__all__ = ["ReplayCache"]
