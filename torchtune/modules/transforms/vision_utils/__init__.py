"""Functions that resize, pad and tile images; each is in a module of its own name."""
