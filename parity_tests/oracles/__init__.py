"""Checks of what both twins share, and of what is logged, evaluated, sampled and exported.

Expected values come from outside the function under test: a formula in the test, a published one,
or another library. `bugs.py` plants bugs of training semantics, each with the test that must fail.
"""
