"""Where two programs first differ: a module, and the source line of each side."""
