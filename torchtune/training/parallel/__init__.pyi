from ._parallel_dims import LateExchange
from ._parallel_dims import ParallelDims as ParallelDims
from ._parallel_dims import ParallelDimsError as ParallelDimsError
from ._parallelize import (
    ShardCondition,
    check_parallelizable,
    sequence_multiple,
    shard_for_inference,
    shard_model,
    unshard_output,
)
from ._ranks import NO_TIMEOUT, Ranks, all_gather_object, any_rank, broadcast_object, lowest_of_ranks
from ._shards import (
    LocalShard,
    ShardGrid,
    checksum_bits,
    checksum_parameters,
    checksum_trained,
    fingerprint_weights,
    full_slices,
    full_tensor,
    is_sharded,
    my_shard,
    read_shard,
    reduce_partial,
    reshard,
    type_before_fsdp,
)
