"""The framework tables: a grid of cells, each measured in a process of its own, and their report."""
