"""Replays and captures as tasks of dask.distributed, on one machine or many."""
