"""Random models of ``transformers`` with image tokens, small enough to compare in a moment."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny import write_tokenizer

IMAGE, VIDEO, START, END = 316, 317, 318, 319  # after the tokens of the text


def qwen3_vl_config() -> Any:
    from transformers import Qwen3VLConfig

    text = {
        "vocab_size": 320,
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


def qwen3_vl_moe_config() -> Any:
    from transformers import Qwen3VLMoeConfig

    whole = qwen3_vl_config().to_dict()
    for part in (whole, whole["text_config"], whole["vision_config"]):
        del part["model_type"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    whole["text_config"] = {**whole["text_config"], **experts}
    return Qwen3VLMoeConfig(**whole)


def qwen3_5_config() -> Any:
    from transformers import Qwen3_5Config

    return Qwen3_5Config(**_qwen3_5())


def qwen3_5_moe_config() -> Any:
    from transformers import Qwen3_5MoeConfig

    parts = _qwen3_5()
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    parts["text_config"] = {**parts["text_config"], "num_experts": 4, "num_experts_per_tok": 2, **sizes}
    return Qwen3_5MoeConfig(**parts)


def _qwen3_5() -> dict[str, Any]:
    text = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 36,
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    return {"text_config": text, "vision_config": vision, **ids}


def qwen2_5_vl_config() -> Any:
    from transformers import Qwen2_5_VLConfig

    text = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,  # two tokens a side
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)


def image_text_model(config: Any, seed: int = 0) -> Any:
    """A random model with weights that are large enough for errors to show."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if "norm" in name and "weight" in name else 0.15 * noise)
    return model


CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == "image" -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}
{{ item.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_image_checkpoint(model: Any, folder: Path) -> Path:
    """Save a model with image tokens, its tokenizer and its image processor."""
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    model.save_pretrained(folder)
    if model.config.model_type == "qwen3_vl_moe":  # published files have [in, out]
        tensors = load_file(folder / "model.safetensors")
        experts = {name: value.transpose(1, 2).contiguous() for name, value in tensors.items() if ".experts." in name}
        save_file({**tensors, **experts}, folder / "model.safetensors", {"format": "pt"})
    size = write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert IMAGE <= size < VIDEO + 8
    tokenizer.add_special_tokens(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    assert [tokenizer.token_to_id(text) for text in ("<|image_pad|>", "<|vision_end|>")] == [IMAGE, END]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def write_pictures(folder: Path, count: int = 12, times: int = 1) -> dict[str, Any]:
    """Write pictures of one color and questions about it; return the settings of a recipe that reads them."""
    from PIL import Image

    rows = []
    for i in range(count):
        answer, color = [("r", "red"), ("g", "lime"), ("b", "blue")][i % 3]
        Image.new("RGB", (20 + 3 * i, 50 - 3 * i), color).save(folder / f"{i}.png")
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": answer}]
        rows.append({"image": f"{i}.png", "conversations": turns})
    (folder / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * times))
    return {
        "tokenizer": {"_component_": "torchtune.models.image_text_transform", "path": str(folder / "checkpoint")},
        "dataset": {
            "_component_": "torchtune.datasets.multimodal.multimodal_chat_dataset",
            "source": str(folder / "pictures.jsonl"),
            "image_dir": str(folder),
            "image_tag": "<image>",
        },
    }
