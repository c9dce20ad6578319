"""The framework tables: a grid of cells, each in a process of its own, and their report."""
