"""`lockstep plan`: what should I run? Memory and time of a training step, from formulas.

shape -> memory, roofline -> recommend -> command. No framework is asked.
"""
