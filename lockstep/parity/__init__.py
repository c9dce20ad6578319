"""The comparisons of the parity ladder; they use only the `Twin` protocol, no framework."""
