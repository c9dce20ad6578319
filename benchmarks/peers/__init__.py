"""Other trainers run here as `lockstep.twin.Runner`s on the same weights and batches.

Each module has `build(config) -> Runner` and refuses, with a UserError, what it has no counterpart
for. None imports our twins.
"""
