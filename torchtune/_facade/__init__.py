"""``torchtune.load``, ``save``, ``generate``, ``classify`` and ``embed``, for programs without a recipe."""

from torchtune._facade._classify import classify
from torchtune._facade._generate import generate
from torchtune._facade._load_model import adapted_copy, load, load_adapted_shard, load_to_save
from torchtune._facade._save_model import save
from torchtune.evaluation import embed

__all__ = ["adapted_copy", "classify", "embed", "generate", "load", "load_adapted_shard", "load_to_save", "save"]
