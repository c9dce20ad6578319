"""Number formats narrower than float32: what each holds, and how float32 is rounded to it."""
