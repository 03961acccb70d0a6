"""How a model and its batches are distributed: the device mesh, sharding, tensor and context parallelism."""
