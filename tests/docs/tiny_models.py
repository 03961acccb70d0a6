"""Builders with the signatures of those that the pages name, of a model that trains in seconds."""

from pathlib import Path

from tests.tiny import write_checkpoint
from torchtune.models import from_hf_config
from torchtune.models._builders import lora_builder
from torchtune.modules import TransformerDecoder

FOLDER: list[Path] = []  # the folder of the tiny checkpoint, once there is one


def make(folder: Path) -> Path:
    """Write the checkpoint that the builders describe."""
    write_checkpoint(folder)
    FOLDER[:] = [folder]
    return folder


def smollm2_135m(tie_word_embeddings: bool = True) -> TransformerDecoder:
    """The tiny model in the place of SmolLM2 135M."""
    assert tie_word_embeddings
    return from_hf_config(str(FOLDER[0]))


lora_smollm2_135m = lora_builder(smollm2_135m, "lora_smollm2_135m", __name__, "the tiny model with LoRA adapters")
