"""Estimates and checks before a run: memory, rows, steps, and settings that cannot work."""
