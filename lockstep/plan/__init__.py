"""`lockstep plan`: predicts memory and time of a training step by formulas.

shape -> memory, roofline -> recommend -> command. No framework is asked.
"""
