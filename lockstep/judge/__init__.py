"""Judges two programs' numbers: findings, rules, noise, envelopes, tolerances.

The ladder (`lockstep.parity`) and `lockstep check` judge by the same parts.
"""
