"""The neutral core of Lockstep: everything both twins agree on, and no framework.

Nothing in this package imports jax or torch, directly or through a dependency;
`parity_tests/house/test_neutrality.py` holds it to that.
"""

__version__ = "0.2.0"
