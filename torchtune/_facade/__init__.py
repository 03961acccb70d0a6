"""``torchtune.load``, ``save``, ``generate``, ``classify`` and ``embed``, for programs without a recipe."""

from torchtune._facade._inference import classify, generate
from torchtune._facade._load_and_save import adapted_copy, load, load_adapted_shard, load_to_save, save
from torchtune.evaluation import embed

__all__ = ["adapted_copy", "classify", "embed", "generate", "load", "load_adapted_shard", "load_to_save", "save"]
