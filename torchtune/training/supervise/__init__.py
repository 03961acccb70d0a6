"""Supervision of a run: signals, checkpoints due, skipped steps, watchdog, out-of-memory errors, progress, report."""
