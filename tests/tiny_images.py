"""Random models of ``transformers`` with image tokens, small enough to compare in a moment."""

from pathlib import Path
from typing import Any

import torch

IMAGE, VIDEO, START, END = 308, 309, 310, 311


def qwen3_vl_config() -> Any:
    from transformers import Qwen3VLConfig

    text = {
        "vocab_size": 316,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True},
    }
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def image_text_model(config: Any, seed: int = 0) -> Any:
    """A random model with weights that are large enough for errors to show."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name and "weight" in name else 0.15 * noise)
    return model


def write_image_checkpoint(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
