"""The two sides of a check: a recorded reference, and a port's program that answers questions."""
