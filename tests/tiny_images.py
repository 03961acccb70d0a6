"""Random models of ``transformers`` with image tokens, small enough to compare in a moment."""

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.tiny import write_lines, write_tokenizer

IMAGE, VIDEO, START, END = 316, 317, 318, 319  # after the tokens of the text
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "patch_size": 4}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}


def qwen3_vl_config() -> Any:
    from transformers import Qwen3VLConfig

    text = {
        **_TEXT,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True},
    }
    vision = {**_QWEN_TOWER, "depth": 4, "out_hidden_size": 32, "num_position_embeddings": 36}
    vision["deepstack_visual_indexes"] = [0, 2]
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **_IDS)


def qwen3_vl_moe_config() -> Any:
    from transformers import Qwen3VLMoeConfig

    config = qwen3_vl_config().to_dict()
    for part in (config, config["text_config"], config["vision_config"]):
        del part["model_type"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    config["text_config"] = {**config["text_config"], **experts}
    return Qwen3VLMoeConfig(**config)


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
        **_TEXT,
        "num_hidden_layers": 4,
        "head_dim": 32,
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
    vision = {**_QWEN_TOWER, "out_hidden_size": 32, "num_position_embeddings": 36}
    return {"text_config": text, "vision_config": vision, **_IDS}


def qwen2_5_vl_config() -> Any:
    from transformers import Qwen2_5_VLConfig

    text = {
        **_TEXT,
        "hidden_size": 64,
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {
        **_QWEN_TOWER,
        "depth": 3,
        "window_size": 16,  # two tokens a side
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_IDS)


def gemma4_config(**more: Any) -> Any:
    """As the large models: a token of an image sees the later ones, keys are values, means are standardized."""
    from transformers import Gemma4Config

    text = {
        **_TEXT,
        "vocab_size_per_layer_input": 320,
        "num_hidden_layers": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        "use_bidirectional_attention": "vision",
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
        "pad_token_id": 3,
    }
    vision = {
        **_TOWER,
        "hidden_size": 32,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 64,
        "standardize": True,
    }
    for name, part in (("text_config", text), ("vision_config", vision)):
        part |= more.pop(name, {})
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": START, "eoi_token_id": END}
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=None, audio_token_id=315, **ids)


def gemma4_small_config() -> Any:
    """As E2B and E4B: embeddings in every layer, shared keys, clipped linear layers."""
    text = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1, "attention_k_eq_v": False}
    text |= {"num_global_key_value_heads": None, "use_bidirectional_attention": None, "use_double_wide_mlp": True}
    return gemma4_config(text_config=text, vision_config={"use_clipped_linears": True, "standardize": False})


def gemma4_unified_config() -> Any:
    """As the 12B model: no tower, and a token of an image sees the later ones."""
    from transformers import Gemma4UnifiedConfig

    config = gemma4_config().to_dict()
    text = config["text_config"]
    vision = {"patch_size": 4, "pooling_kernel_size": 3, "mm_posemb_size": 64}
    absent = ("model_type", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
    text = {name: value for name, value in text.items() if name not in absent}
    vision |= dict.fromkeys(("mm_embed_dim", "output_proj_dims"), 24)
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    return Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=None, **ids)


def smolvlm_config(kind: str = "SmolVLMConfig") -> Any:
    import transformers

    text = {**_TEXT, "model_type": "llama", "vocab_size": 321}  # with the token that ends a turn
    vision = {**_TOWER, "image_size": 16}
    settings = {"scale_factor": 2, "image_token_id": IMAGE, "tie_word_embeddings": True}
    return getattr(transformers, kind)(text_config=text, vision_config=vision, **settings)


def idefics3_config() -> Any:
    return smolvlm_config("Idefics3Config")


def mistral3_config(model_type: str = "mistral", **more: Any) -> Any:
    from transformers import Mistral3Config

    text = {
        **_TEXT,
        "model_type": model_type,
        "head_dim": 8,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
    }
    vision = {**_TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 64, "hidden_act": "silu"}
    settings = {"image_token_index": IMAGE, "spatial_merge_size": 2, "tie_word_embeddings": False}
    return Mistral3Config(text_config={**text, **more}, vision_config=vision, **settings)


def ministral3_config() -> Any:
    """With YaRN, queries scaled by position, and biases of the projector."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    config = mistral3_config("ministral3", rope_parameters=rope)
    config.multimodal_projector_bias = True
    return config


def pixtral_config() -> Any:
    """As Pixtral 12B: a token for each patch."""
    from transformers import LlavaConfig

    parts = mistral3_config().to_dict()
    parts = {name: parts[name] for name in ("text_config", "vision_config", "tie_word_embeddings")}
    settings = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": IMAGE}
    return LlavaConfig(**parts, **settings)


def llama4_config() -> Any:
    """With experts in two layers, chunks that are shorter than the rows, and a layer without positions."""
    from transformers import Llama4Config

    text = {
        **_TEXT,
        "intermediate_size": 24,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_local_experts": 4,
        "moe_layers": [1, 3],
        "attention_chunk_size": 8,
    }
    widths = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 24)
    vision = {**_TOWER, **widths, "intermediate_size": 64, "image_size": 16}
    ids = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
    return Llama4Config(text_config=text, vision_config=vision, **ids)


CONFIGS = {
    "qwen3_vl": qwen3_vl_config,
    "qwen3_vl_moe": qwen3_vl_moe_config,
    "qwen3_5_vl": qwen3_5_config,
    "qwen3_5_vl_moe": qwen3_5_moe_config,
    "qwen2_5_vl": qwen2_5_vl_config,
    "gemma4_vl": gemma4_config,
    "gemma4_vl_small": gemma4_small_config,
    "gemma4_unified_vl": gemma4_unified_config,
    "smolvlm": smolvlm_config,
    "idefics3": idefics3_config,
    "llama4_vl": llama4_config,
    "mistral3": mistral3_config,
    "ministral3": ministral3_config,
    "pixtral": pixtral_config,
}


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
        for name, buffer in model.named_buffers():
            noise = torch.rand(buffer.shape, generator=generator)
            if name.endswith(("_min", "_max")):
                buffer.copy_(-0.5 - noise if name.endswith("_min") else 0.5 + noise)
            elif name.endswith(("std_bias", "std_scale")):
                buffer.copy_(0.5 + noise)
    return model


def inputs_of(hf_model: Any, tokens: torch.Tensor, patches: torch.Tensor, grids: Any) -> dict[str, torch.Tensor]:
    """What ``transformers`` takes for our patches of all images of one row; grids of several frames are a video."""
    kinds = (tokens == IMAGE).long() + 2 * (tokens == VIDEO)
    if hf_model.config.model_type in GEMMA:
        pixels, places = gemma(patches, grids, **GEMMA[hf_model.config.model_type])
        inputs = {"mm_token_type_ids": kinds, **masks_of(hf_model, kinds)}
        if grids[0][0] == 1:
            return {**inputs, "pixel_values": pixels, "image_position_ids": places}
        frames = torch.tensor([frames for frames, _, _ in grids], device=patches.device)
        inputs |= {"pixel_values_videos": pixels, "num_frames_per_video": frames}
        return {**inputs, "video_position_ids": places}
    if hf_model.config.model_type in TILED:
        return {"pixel_values": squares(patches, 4)[None]}
    if hf_model.config.model_type == "llama4":
        return {"pixel_values": squares(patches, 4)}
    if hf_model.config.model_type in ("mistral3", "llava"):
        pixels, sizes = padded_pixels(patches, grids, getattr(hf_model.config, "spatial_merge_size", 1))
        return {"pixel_values": pixels, "image_sizes": sizes}
    video = grids[0][0] > 1
    names = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
    return {"mm_token_type_ids": kinds, names[0]: patches, names[1]: torch.tensor(grids, device=patches.device)}


def masks_of(hf_model: Any, kinds: torch.Tensor) -> dict[str, Any]:
    """The masks of Gemma 4 12B in ``transformers`` for static caches, which are those of the other models of Gemma 4.

    In those of its forward pass alone, a token of an image sees the later ones in layers without a window, too.
    """
    if hf_model.config.model_type != "gemma4_unified":
        return {}
    positions = torch.arange(kinds.shape[1])[None]
    embeds = torch.zeros(*kinds.shape, 1)
    masks = hf_model.create_masks_for_generate(hf_model.config, embeds, None, None, positions, mm_token_type_ids=kinds)
    return {"attention_mask": masks}


# Patches of a token, and those from -1 to 1 are from 0 to 1 in transformers.
GEMMA = {"gemma4": {"merge": 3, "centered": True}, "gemma4_unified": {"merge": 1, "centered": False}}


def gemma(patches: torch.Tensor, grids: Any, merge: int, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches and their positions, padded to as many."""
    from torchtune.modules.vision_transformer import patch_places

    counts = []  # patches of each frame
    for frames, rows, columns in grids:
        counts += [rows * columns] * frames
    pixels = torch.zeros(len(counts), max(counts) + 18, patches.shape[1], device=patches.device)
    places = torch.full((len(counts), max(counts) + 18, 2), -1, device=patches.device)
    parts = zip(patches.split(counts), patch_places(grids, merge)[:2].split(counts, 1), strict=True)
    for i, (part, patch_positions) in enumerate(parts):
        pixels[i, : counts[i]] = (part + 1) / 2 if centered else part
        places[i, : counts[i]] = patch_positions.flip(0).T
    return pixels, places


def patches_by(processor: Any, image: Any) -> torch.Tensor:
    """The patches of a Pillow image, as the tower gets them."""
    return processor.colors.values(torch.from_numpy(processor.pixels(image)))


TILED = ("smolvlm", "idefics3")


def pixels_of(patches: torch.Tensor, rows: int, columns: int, merge: int = 2) -> torch.Tensor:
    """The pixels [3, h, w] of an image from its patches of 3 x 4 x 4, in blocks of ``merge`` x ``merge``."""
    blocks = patches.view(rows // merge, columns // merge, merge, merge, 3, 4, 4)
    return blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * 4, columns * 4)


def squares(patches: torch.Tensor, side: int) -> torch.Tensor:
    return torch.stack([pixels_of(part, side, side) for part in patches.split(side * side)])


def padded_pixels(patches: torch.Tensor, grids: Any, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = patches.split([rows * columns for _, rows, columns in grids])
    images = [pixels_of(part, *grid[1:], merge) for part, grid in zip(parts, grids, strict=True)]
    sizes = torch.tensor([image.shape[1:] for image in images], device=patches.device)
    pixels = torch.zeros(len(images), 3, *sizes.amax(0).tolist(), device=patches.device)
    for canvas, image in zip(pixels, images, strict=True):
        canvas[:, : image.shape[1], : image.shape[2]] = image
    return pixels, sizes


CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == "image" -%}
PLACEHOLDER
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


GEMMA_PROCESSOR = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 12}
TILES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
PROCESSORS = {
    **dict.fromkeys(GEMMA, GEMMA_PROCESSOR),
    "smolvlm": TILES,
    "idefics3": TILES,
    "llama4": {"size": {"height": 16, "width": 16}, "max_patches": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "mistral3": {"patch_size": 4, "size": {"longest_edge": 32}},
    "llava": {"patch_size": 4, "size": {"longest_edge": 16}},
}
# The tokens behind those of the text: the image token first.
QWEN_SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TILED_SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>")
TILED_STOP = "<end_of_utterance>"
SPECIAL = {
    **dict.fromkeys(GEMMA, ("<|image|>", "<|video|>", "<|image>", "<image|>")),
    "smolvlm": TILED_SPECIAL,
    "idefics3": TILED_SPECIAL,
    "llama4": ("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>"),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[INST]", "[IMG_END]"),
    "llava": ("[IMG]", "[IMG_BREAK]", "[INST]", "[IMG_END]"),
}


def image_template(family: str) -> str:
    """Return the published chat template of SmolVLM and Idefics 3; ChatML with images for other families."""
    if family in TILED:
        published = Path(find_spec("trl").origin).parent / "chat_templates"
        return (published / f"{family}.jinja").read_text()
    special = SPECIAL.get(family, QWEN_SPECIAL)
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>" if special == QWEN_SPECIAL else special[0]
    return CHAT_TEMPLATE.replace("PLACEHOLDER", "<|image|>" if family == "llama4" else placeholder)


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
    special = SPECIAL.get(model.config.model_type, QWEN_SPECIAL)
    tokenizer.add_special_tokens(list(special))
    assert [tokenizer.token_to_id(text) for text in (special[0], special[-1])] == [IMAGE, END]
    if model.config.model_type in TILED:
        tokenizer.add_special_tokens([TILED_STOP])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(image_template(model.config.model_type))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS.get(model.config.model_type, PROCESSOR)))
    return folder


def write_questions(folder: Path, sizes: Iterable[tuple[int, int]], times: int = 1) -> Path:
    """Write pictures of one color and questions about it, ``times`` each."""
    from PIL import Image

    rows = []
    for i, size in enumerate(sizes):
        answer, color = [("r", "red"), ("g", "lime"), ("b", "blue")][i % 3]
        Image.new("RGB", size, color).save(folder / f"{i}.png")
        turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": answer}]
        rows.append({"image": f"{i}.png", "conversations": turns})
    return write_lines(folder / "pictures.jsonl", rows * times)


def write_pictures(folder: Path, count: int = 12) -> dict[str, Any]:
    """Write questions about pictures; return the settings of a recipe that reads them."""
    return {
        "tokenizer": {"_component_": "torchtune.models.image_text_transform", "path": str(folder / "checkpoint")},
        "dataset": {
            "_component_": "torchtune.datasets.multimodal.multimodal_chat_dataset",
            "source": str(write_questions(folder, ((20 + 3 * i, 50 - 3 * i) for i in range(count)))),
            "image_dir": str(folder),
            "image_tag": "<image>",
        },
    }
