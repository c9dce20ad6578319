"""The six experiments, which `python -m benchmarks.run NAME` makes."""
