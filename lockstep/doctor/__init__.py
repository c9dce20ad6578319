"""`lockstep doctor`: what this machine and its frameworks can do, and what stands in the way.

machine and inside (facts) -> policies and rules (pure functions of facts) -> report
"""
