"""`lockstep doctor`: what this machine and its frameworks can run, and what is misconfigured.

machine and inside (facts) -> policies and rules (pure functions of facts) -> report
"""
