"""One offline page of a finished run: its numbers, its sets, and the prompt's text, shaded by the kept tokens."""
