"""How the layers of one model work on several devices at once."""

from torchtune.modules.parallel._collectives import sum_gradients
from torchtune.modules.parallel._context import ContextParallelAttention
from torchtune.modules.parallel._styles import (
    ByColumns,
    ByRows,
    ByVocabulary,
    GatherInput,
    ReplicatedNorm,
    SplitNorm,
    vocabulary_parallel_linear,
)

__all__ = [
    "ByColumns",
    "ByRows",
    "ByVocabulary",
    "ContextParallelAttention",
    "GatherInput",
    "ReplicatedNorm",
    "SplitNorm",
    "sum_gradients",
    "vocabulary_parallel_linear",
]
