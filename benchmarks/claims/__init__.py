"""What literature and tutorials say of mixed precision, beside what was measured here."""
