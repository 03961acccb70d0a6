"""What a run achieves: tokens per second, FLOPs, overlap of communication and computation."""
