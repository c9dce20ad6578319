"""The suite. Both frameworks in one process, on a CPU; nothing imports this package."""
