"""Tensor, sequence, context and expert parallelism of layers."""

from torchtune.modules.parallel._collectives import sum_gradients
from torchtune.modules.parallel._context import ContextParallelAttention
from torchtune.modules.parallel._styles import (
    ColwiseParallel,
    GatherInput,
    ReplicatedNorm,
    RowwiseParallel,
    ShardedNorm,
    VocabParallel,
    vocabulary_parallel_linear,
)
from torchtune.modules.parallel.expert_parallel import ExpertParallel, check_experts, place_experts

__all__ = [
    "ColwiseParallel",
    "ContextParallelAttention",
    "ExpertParallel",
    "GatherInput",
    "ReplicatedNorm",
    "RowwiseParallel",
    "ShardedNorm",
    "VocabParallel",
    "check_experts",
    "place_experts",
    "sum_gradients",
    "vocabulary_parallel_linear",
]

from torchtune.modules.parallel._styles import ParallelError as ParallelError
