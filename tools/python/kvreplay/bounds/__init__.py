"""`kvreplay regret`: the gap in attention recall between policies and the best kept sets, as a sum of terms."""
