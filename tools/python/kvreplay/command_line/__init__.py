"""Command lines of the program that need Python: policies in Python, and replays that watch their policies' files."""
