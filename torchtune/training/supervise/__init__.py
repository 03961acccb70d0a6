"""What watches a run: stop and save requests, skipped steps, stalled ranks, lack of memory, progress, the report."""
