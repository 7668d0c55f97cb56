"""Calibration files of eviction methods, computed from traces."""
