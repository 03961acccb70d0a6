"""What is known before a run: memory, rows and steps, and what keeps it from starting."""
