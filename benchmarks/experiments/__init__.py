"""The five experiments, which `python -m benchmarks.run NAME` makes."""
