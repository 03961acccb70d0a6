"""Distributed training: the device mesh, sharding, tensor, context and expert parallelism."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {},
    between_rooms={
        "LocalShard": "_shards",
        "ParallelDims": "_parallel_dims",
        "ParallelDimsError": "_parallel_dims",
        "Ranks": "_ranks",
        "ShardGrid": "_shards",
        "all_gather_object": "_ranks",
        "any_rank": "_ranks",
        "broadcast_object": "_ranks",
        "check_parallelizable": "_parallelize",
        "full_slices": "_shards",
        "full_tensor": "_shards",
        "my_shard": "_shards",
        "read_shard": "_shards",
        "reduce_partial": "_shards",
        "reshard": "_shards",
        "spec_of": "_shards",
        "ShardCondition": "_parallelize",
        "unshard_output": "_parallelize",
        "shard_model": "_parallelize",
    },
)
