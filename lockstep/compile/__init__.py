"""`lockstep compile`: what a training step does on a CUDA device that is not here."""
