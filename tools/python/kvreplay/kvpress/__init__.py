"""Policies as presses of kvpress."""

from kvreplay.kvpress.press import ReplayPress

__all__ = ["ReplayPress"]
