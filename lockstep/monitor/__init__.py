"""Looking at runs, while they go on and afterwards."""
