"""Convert checkpoints between two programs by the mapping that `lockstep check` proved."""
