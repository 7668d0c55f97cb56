"""`kvreplay regret`: how far policies stay below the best that could be kept, and why."""
