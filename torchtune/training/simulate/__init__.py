"""Two steps of a recipe on a simulated cluster: memory, FLOPs, traffic and time, known before anything is rented."""
