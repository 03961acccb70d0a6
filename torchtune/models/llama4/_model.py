"""Llama 4: the format, the sizes and the tokenizer of its text decoder, and its image processor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from torchtune.data import DataError
from torchtune.models._description import Description, Llama3RopeScaling
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, all_but_every, layers_of_type, write_layer_types
from torchtune.models._hf_layers import read_unrotated_layers, write_unrotated_layers
from torchtune.models._image_processors import BILINEAR, Plan, TiledImageProcessor
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, experts, renamed, shared_expert, with_fused_experts
from torchtune.modules.transforms.vision import find_supported_resolutions, get_canvas_best_fit, get_inscribed_size
from torchtune.tokenizers import HeaderTurns


def _read(fields: Fields) -> dict[str, Any]:
    num_layers = fields.take("num_hidden_layers")
    expert_dim = fields.take("intermediate_size", 8192)
    unrotated_layers = read_unrotated_layers(fields)
    chunk_layers = _read_chunk_layers(fields, num_layers, unrotated_layers)
    # null, unlike an absent field, would be chunks of no size.
    if chunk_layers and fields.has("attention_chunk_size") and fields.peek("attention_chunk_size") is None:
        raise fields.refusal("attention_chunk_size", None)
    chunk = fields.take("attention_chunk_size", 8192)
    moe_layers = fields.list_of("moe_layers", num_layers, int)
    step = fields.take("interleave_moe_layer_step", 1)
    if moe_layers is None:
        moe_layers = range(step - 1, num_layers, max(step, 1))
    values = {
        "intermediate_dim": fields.take("intermediate_size_mlp", 16_384),
        "num_experts": fields.take("num_local_experts", 16),
        "expert_dim": expert_dim,
        "shared_expert_dim": expert_dim,
        "expertless_layers": tuple(layer for layer in range(num_layers) if layer not in moe_layers),
        "unrotated_layers": unrotated_layers,
        "chunk": chunk if chunk_layers else None,
        "chunk_layers": chunk_layers,
    }
    # In layers without RoPE, queries grow with the logarithm of their position. The fields are read even if they have
    # no effect, because an unread field is refused.
    growth = float(fields.take("attn_scale", 0.1))
    growth_span = fields.take("floor_scale", 8192)
    if fields.take("attn_temperature_tuning", True) and unrotated_layers:
        values["query_growth"] = growth
        values["query_growth_span"] = growth_span
        values["query_growth_first"] = 1  # positions count from 1
        values["query_growth_layers"] = unrotated_layers
    return values


def _read_chunk_layers(fields: Fields, num_layers: int, unrotated_layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers with chunked attention: by default, those with RoPE."""
    layer_types = fields.list_of("layer_types", num_layers, str)
    if not layer_types:
        return tuple(layer for layer in range(num_layers) if layer not in unrotated_layers)
    unknown = [entry for entry in layer_types[:num_layers] if entry not in ("full_attention", "chunked_attention")]
    if unknown or len(layer_types) < num_layers:
        raise fields.refusal("layer_types", unknown or layer_types)
    return layers_of_type(layer_types[:num_layers], "chunked_attention")


def _write(d: Description) -> dict[str, Any]:
    config = {
        "intermediate_size_mlp": d.intermediate_dim,
        "intermediate_size": d.expert_dim,
        "num_local_experts": d.num_experts,
        "moe_layers": list(d.expert_layers),
        **write_unrotated_layers(d),
        "layer_types": write_layer_types(d.num_layers, d.chunk_layers, "chunked_attention"),
        "attention_chunk_size": d.chunk,
        "attn_temperature_tuning": bool(d.query_growth),
    }
    if d.query_growth:
        config["attn_scale"] = d.query_growth
        config["floor_scale"] = d.query_growth_span
    return config


FORMAT = HFFormat(
    "Llama4ForCausalLM",
    "llama4_text",
    "interleaved",
    biases="attention_bias",
    mixer_layer_type="chunked_attention",
    fixed={"router_scores": "sigmoid", "router_scales_input": True},
    extra_fields=(
        ("num_experts_per_tok", "experts_per_token", 1),
        ("use_qk_norm", "qk_unit_norm", True),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    read_more=_read,
    write_more=_write,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    },
)
_EXPERTS = with_fused_experts(experts(HF_HALF, "mlp", "gate_proj", "up_proj", "down_proj"), "mlp", transpose=False)
_NAMES = {".mlp.gate.": ".mlp.router.", ".mlp.": ".feed_forward."}
SPEC = family(
    "llama4",
    FORMAT,
    renamed(shared_expert(_EXPERTS, "mlp.shared_expert"), _NAMES),
    model_types=("LLAMA4",),
    module_prefixes={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)

_UNROTATED = tuple(range(3, 48, 4))
_SCOUT = FORMAT.describe(
    vocab_size=202_048,
    num_layers=48,
    embed_dim=5120,
    intermediate_dim=16_384,
    max_seq_len=10_485_760,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    qk_unit_norm=True,
    chunk=8192,
    chunk_layers=all_but_every(48, 4),
    rope_base=500_000.0,
    rope_scaling=Llama3RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_seq_len=8192),
    unrotated_layers=_UNROTATED,
    query_growth=0.1,
    query_growth_span=8192,
    query_growth_first=1,
    query_growth_layers=_UNROTATED,
    num_experts=16,
    experts_per_token=1,
    expert_dim=8192,
    router_balance=0.001,
    shared_expert_dim=8192,
)
SIZES = {
    "llama4_scout_17b_16e": _SCOUT,
    "llama4_maverick_17b_128e": replace(
        _SCOUT,
        max_seq_len=1_048_576,
        qk_unit_norm=False,
        rope_scaling=None,
        num_experts=128,
        expertless_layers=tuple(range(0, 48, 2)),
    ),
}


_FIRST_ID = 200_000
_TEXT_RESERVED = [f"text_post_train_reserved_special_token_{i}" for i in range(69)]
_VISION_RESERVED = [f"vision_reserved_special_token_{i}" for i in range(1048)]
_REASONING_RESERVED = [f"reasoning_reserved_special_token_{i}" for i in range(8)]
_RESERVED = [f"reserved_special_token_{i}" for i in range(904)]
# In the order of their ids; reserved tokens were renamed when they got a meaning.
_TOKEN_NAMES = [
    "begin_of_text",
    "end_of_text",
    "fim_prefix",
    "fim_middle",
    "fim_suffix",
    "header_start",
    "header_end",
    "eom",
    "eot",
    "step",
    *_TEXT_RESERVED[:8],
    "finetune_right_pad",
    *_TEXT_RESERVED[8:],
    "image_start",
    "image_end",
    *_VISION_RESERVED[:2],
    "tile_x_separator",
    "tile_y_separator",
    *_VISION_RESERVED[2:6],
    "image",
    _VISION_RESERVED[6],
    "patch",
    *_VISION_RESERVED[7:],
    *_REASONING_RESERVED,
    "reasoning_thinking_start",
    "reasoning_thinking_end",
    *_RESERVED,
]
LLAMA4_SPECIAL_TOKENS = {f"<|{name}|>": _FIRST_ID + i for i, name in enumerate(_TOKEN_NAMES)}
O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Llama4Tokenizer(HeaderTurns):
    """tiktoken tokenizer with Llama 4's chat format.

    Args:
        path: path of Meta's ``tokenizer.model``.
        special_tokens: text -> id; by default Llama 4's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: adds texts to the messages before they are formatted.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken, or a required special token is missing.
    """

    family = "Llama 4"
    pattern = O200K_PATTERN
    required = ("begin_of_text", "end_of_text", "header_start", "header_end", "eom", "eot")
    optional = ("finetune_right_pad", "step")
    default_tokens = LLAMA4_SPECIAL_TOKENS


@dataclass(frozen=True, kw_only=True)
class Llama4ImageProcessor(TiledImageProcessor):
    """Image processor of Llama 4: tiles of the best-fitting canvas, then the whole image as a tile.

    Attributes:
        max_tiles: maximum number of tiles of a canvas.
    """

    patch_size: int = 14
    merge: int = 2
    placeholder: ClassVar[str] = "<|image|>"
    resample: ClassVar[int] = BILINEAR
    tower_tile: ClassVar[int] = 448
    tile: int = 336
    max_tiles: int = 16

    @classmethod
    def read_sizes(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.read_sizes`."""
        if config.get("resize_to_max_canvas"):
            raise DataError("resize_to_max_canvas = True is not supported")
        return {
            "patch_size": (model.get("vision_config") or {}).get("patch_size"),
            "tile": (config.get("size") or {}).get("height"),
            "max_tiles": config.get("max_patches"),
        }

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return size of the canvas, grids and number of tokens of an image, from its (width, height) in pixels."""
        width, height = size
        canvases = torch.tensor(find_supported_resolutions(self.max_tiles, self.tile))
        image = torch.empty(height, width, device="meta")  # only its shape counts
        canvas_height, canvas_width = get_canvas_best_fit(image, canvases, resize_to_max_canvas=False)
        return self.plan_for_tiles(canvas_height, canvas_width)

    def pixels(self, image: Any) -> np.ndarray:
        """Return the patches of a Pillow image in RGB, uint8 ``[p, 3 * patch_size²]``, by tile and by block."""
        plan = self.plan(image.size)
        height, width = get_inscribed_size((image.height, image.width), (plan.height, plan.width), max_size=self.tile)
        # A crop beyond the image pads it with black.
        canvas = self.resized(image, width, height).crop((0, 0, plan.width, plan.height))
        return self.patches_of_tiles(canvas, image)

    def layout(self, plan: Plan) -> str:
        """Return the text that replaces the placeholder of an image."""
        tile_tokens = "<|patch|>" * (plan.tokens // len(plan.grids))
        rows = plan.height // self.tile
        columns = plan.width // self.tile
        tiles = ""
        if len(plan.grids) > 1:
            row = "<|tile_x_separator|>".join([tile_tokens] * columns) + "<|tile_y_separator|>"
            tiles = row * rows
        return f"<|image_start|>{tiles}<|image|>{tile_tokens}<|image_end|>"
