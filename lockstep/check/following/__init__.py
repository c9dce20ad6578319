"""Follows every value of two recorded programs, from operation to operation: which tensors they
have in common, and where they part."""
