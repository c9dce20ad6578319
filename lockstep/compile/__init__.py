"""`lockstep compile`: facts of a training step on an absent GPU or TPU."""
