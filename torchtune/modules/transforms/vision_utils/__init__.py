"""Functions that resize, pad and tile images, each in a module of the same name."""
