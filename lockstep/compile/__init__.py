"""`lockstep compile`: what a training step does on a GPU or a TPU that is not here."""
