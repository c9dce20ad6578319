"""Which tensor of the port is which of the reference: by values where they meet, else by names."""
