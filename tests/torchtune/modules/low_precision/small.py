"""A small model, and the definition of NF4 in float64, for the tests of low precision."""

import torch
from torch import nn

from torchtune.models.llama3 import llama3
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.low_precision.formats import NF4_LEVELS
from torchtune.modules.peft import LoRA

TOKENS = torch.arange(24).view(2, 12) % 50


def make_model(lora: LoRA | None = None, dtype: torch.dtype = torch.float32) -> TransformerDecoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 64}
    model = llama3(intermediate_dim=48, **sizes).to(dtype)
    if lora is not None:
        apply_conversions(model, [lora])
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


def nf4_in_float64(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """NF4 of ``weight`` by the definition: nearest level times the scale, which is quantized to 8 bits in its row."""
    blocks = weight.double().unflatten(-1, (-1, block_size))
    scale = blocks.abs().amax(-1)
    lowest = scale.amin(-1, keepdim=True)
    highest = scale.amax(-1, keepdim=True)
    step = (highest - lowest) / 255
    scale = torch.where(step > 0, lowest + step * ((scale - lowest) / step).round(), lowest).unsqueeze(-1)
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64, device=weight.device)
    nearest = (blocks.unsqueeze(-1) / scale.unsqueeze(-1) - levels).abs().argmin(-1)
    return (levels[nearest] * scale).flatten(-2)
