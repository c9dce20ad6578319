"""Users' weights: other programs' checkpoints <-> canonical parameters."""
