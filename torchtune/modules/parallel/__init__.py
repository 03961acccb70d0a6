"""Tensor, sequence, context and expert parallelism of layers."""

from torchtune.modules.parallel.collectives import sum_gradients, vocabulary_parallel_linear
from torchtune.modules.parallel.context_parallel import (
    ContextParallelAttention,
    SequenceShare,
    shard_sequences,
    share_mixers,
)
from torchtune.modules.parallel.expert_parallel import ExpertParallel, check_experts, place_experts
from torchtune.modules.parallel.tensor_parallel import (
    ColwiseParallel,
    GatherInput,
    HeadParallel,
    ReplicatedNorm,
    RowwiseParallel,
    SequenceParallel,
    ShardedNorm,
    VocabParallel,
)

__all__ = [
    "ColwiseParallel",
    "ContextParallelAttention",
    "ExpertParallel",
    "GatherInput",
    "HeadParallel",
    "ReplicatedNorm",
    "RowwiseParallel",
    "SequenceParallel",
    "SequenceShare",
    "ShardedNorm",
    "VocabParallel",
    "check_experts",
    "place_experts",
    "shard_sequences",
    "share_mixers",
    "sum_gradients",
    "vocabulary_parallel_linear",
]

from torchtune.modules.parallel.context_parallel import shards_sequences as shards_sequences
from torchtune.modules.parallel.tensor_parallel import ParallelError as ParallelError
