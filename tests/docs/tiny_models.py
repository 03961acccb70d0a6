"""Builders with the signatures of those that the pages name, of a model that trains in seconds."""

import json
from pathlib import Path

import torch

from tests.tiny import write_checkpoint, write_tokenizer
from torchtune.models import from_hf_config
from torchtune.models._builders import lora_builder
from torchtune.models.smol import smollm2_135m as real_smollm2_135m
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.low_precision import QuantizeBase
from torchtune.modules.peft import LoRA

FOLDER: list[Path] = []  # the folder of the tiny checkpoint, once there is one
IN_PROCESSES_OF_COMMANDS = Path("..", "tmp", "SmolLM2-135M-Instruct")  # from the folder of a page
OUTLINE: list[Path] = []  # that of a checkpoint that has the names and shapes of the real model, and no numbers


def make(folder: Path) -> Path:
    """Write the checkpoint that the builders describe."""
    write_checkpoint(folder)
    FOLDER[:] = [folder]
    return folder


def make_outline(folder: Path) -> None:
    """Write a checkpoint with the names and shapes of SmolLM2 135M and a hole in the place of its numbers."""
    with torch.device("meta"):
        model = real_smollm2_135m()
    parameters = dict(model.named_parameters())
    header = {}
    end = 0
    for group in model.spec.weight_map("hf").groups(model.description):
        tensors = group.to_external([parameters[name] for name in group.tune])
        for name, tensor in zip(group.external, tensors, strict=True):
            header[name] = {
                "dtype": "BF16",
                "shape": list(tensor.shape),
                "data_offsets": [end, end + 2 * tensor.numel()],
            }
            end += 2 * tensor.numel()
    text = json.dumps(header).encode()
    folder.mkdir()
    OUTLINE[:] = [folder]
    write_tokenizer(folder)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def smollm2_135m(tie_word_embeddings: bool = True) -> TransformerDecoder:
    """The tiny model in the place of SmolLM2 135M."""
    assert tie_word_embeddings
    return from_hf_config(str(FOLDER[0] if FOLDER else IN_PROCESSES_OF_COMMANDS))


lora_smollm2_135m = lora_builder(smollm2_135m, "lora_smollm2_135m", __name__, "the tiny model with LoRA adapters")


def qlora_smollm2_135m(
    lora_attn_modules: list[str],
    apply_lora_to_mlp: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
) -> TransformerDecoder:
    """The tiny model with LoRA adapters on a base in NF4, in blocks that divide its widths."""
    lora = LoRA(
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        attn_modules=lora_attn_modules,
        apply_to_mlp=apply_lora_to_mlp,
    )
    model = smollm2_135m()
    apply_conversions(model, [QuantizeBase(block_size=16), lora])
    return model
