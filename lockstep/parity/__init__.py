"""The instruments of the parity ladder, on the `Twin` protocol alone: they name no framework."""
