"""SmolVLM 2: text and images.

SigLIP over tiles of an image and over the whole image, and SmolLM 2 (https://arxiv.org/abs/2504.05299).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from torchtune.models._build_vision import image_text_family
from torchtune.models._description import VisionDescription
from torchtune.models._hf_config import LLAMA
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat
from torchtune.models._image_processors import LANCZOS, Plan, TiledImageProcessor
from torchtune.models._weight_map import Row
from torchtune.models._weight_names import HF_INTERLEAVED, attention_names, module_rows
from torchtune.models._weight_ops import FlatPatches

_LARGEST = 4096
_AROUND = "<fake_token_around_image>"
_IMAGE = "<image>"
_WHOLE = "<global-img>"


@dataclass(frozen=True, kw_only=True)
class SmolVLMImageProcessor(TiledImageProcessor):
    """Image processor of SmolVLM 2 and Idefics 3: tiles of a large image, then the whole image as a tile.

    Attributes:
        longest: longer side of an image after resizing.
        splits: whether images are split into tiles.
    """

    resample: ClassVar[int] = LANCZOS
    tower_tile: ClassVar[int] = 224
    tile: int = 364
    longest: int = 4 * 364
    splits: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> "SmolVLMImageProcessor":
        """See :meth:`ImageProcessor.from_config`."""
        return replace(super().from_config(config, model), splits=bool(config.get("do_image_splitting", True)))

    @classmethod
    def read_sizes(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.read_sizes`."""
        return {
            "patch_size": (model.get("vision_config") or {}).get("patch_size", 32),
            "merge": model.get("scale_factor", 2),
            "tile": (config.get("max_image_size") or {}).get("longest_edge"),
            "longest": (config.get("size") or {}).get("longest_edge"),
        }

    def plan(self, size: tuple[int, int]) -> Plan:
        """Return size, grids and number of tokens of an image, from its (width, height) in pixels."""
        tile = self.tile
        if not self.splits:
            return self.plan_for_tiles(tile, tile)
        width, height = self._first(size)
        ratio = width / height
        # The longer side is rounded up to whole tiles first, and the shorter one follows from it.
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return self.plan_for_tiles(height, width)

    def _first(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return (width, height) with the longer side of ``longest`` pixels."""
        width, height = size
        ratio = width / height
        is_wide = width >= height
        longer = self.longest
        shorter = int(longer / ratio) if is_wide else int(longer * ratio)
        shorter = max(shorter + shorter % 2, 1)  # even
        if longer > _LARGEST:
            shorter = max(int(_LARGEST / (longer / shorter)), 1)
            longer = _LARGEST
        return (longer, shorter) if is_wide else (shorter, longer)

    def pixels(self, image: Any) -> np.ndarray:
        """Return the patches of a Pillow image in RGB, uint8 ``[p, 3 * patch_size²]``, by tile and by block."""
        plan = self.plan(image.size)
        resized = self.resized(image, *self._first(image.size))
        resized = self.resized(resized, plan.width, plan.height)
        return self.patches_of_tiles(resized, resized)

    def layout(self, plan: Plan) -> str:
        """Return the text that replaces the placeholder of an image."""
        tokens = _IMAGE * (plan.tokens // len(plan.grids))
        whole_image = f"{_AROUND}{_WHOLE}{tokens}{_AROUND}"
        if len(plan.grids) == 1:
            return whole_image
        text = ""
        for row in range(1, plan.height // self.tile + 1):
            for column in range(1, plan.width // self.tile + 1):
                text += f"{_AROUND}<row_{row}_col_{column}>{tokens}"
            text += "\n"
        return f"{text}\n{whole_image}"


def _read(fields: Fields, values: dict[str, Any], outer_fields: Fields) -> dict[str, Any]:
    return {"positions_side": fields.typed("image_size", 224) // values["patch_size"]}


def _write(v: VisionDescription) -> dict[str, Any]:
    return {"image_size": v.positions_side * v.patch_size}


FORMAT = ImageTextFormat(
    "SmolVLMForConditionalGeneration",
    "smolvlm",
    replace(
        LLAMA,
        unused=("perceiver_config", "pixel_shuffle_factor"),  # of the code that trained; the connector has scale_factor
        defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    ),
    vision_type="smolvlm_vision",
    tower_fields=(
        *ImageTextFormat.sizes(embed_dim=1152, intermediate_dim=3072, num_layers=12, num_heads=16, patch_size=32),
        ("num_channels", "num_channels", 3),
        ("layer_norm_eps", "norm_eps", 1e-6),
        ("hidden_act", "activation", "gelu_pytorch_tanh"),
    ),
    outer_fields=(("scale_factor", "merge", 2),),
    tokens={"image_token_id": 128_257},
    fixed={"last_norm": True, "positions": "interpolated", "projector_bias": False},
    tower_unused=("max_image_size", "size", "tie_word_embeddings", "use_base_siglip"),
    read_vision=_read,
    write_vision=_write,
    outer_unused=("use_cache", "vocab_size", "image_seq_len", "use_reentrant_checkpoint"),
)
_LAYER = (
    ("sa_norm", "layer_norm1"),
    *attention_names(output="out_proj"),
    ("mlp_norm", "layer_norm2"),
    ("mlp.w1", "mlp.fc1"),
    ("mlp.w2", "mlp.fc2"),
)
_TOWER = "model.vision_model."
_ROWS = [
    Row(f"{_TOWER}embeddings.patch_embedding.weight", "encoder.patch_embed.weight", FlatPatches()),
    Row(f"{_TOWER}embeddings.patch_embedding.bias", "encoder.patch_embed.bias"),
    Row(f"{_TOWER}embeddings.position_embedding.weight", "encoder.positions.table.weight"),
    *module_rows(f"{_TOWER}encoder.layers.{{block}}.", "encoder.layers.{block}.", _LAYER),
    *module_rows(_TOWER, "encoder.", [("norm", "post_layernorm")]),
    Row("model.connector.modality_projection.proj.weight", "encoder.projector.mlp.weight"),
]
NAMES = HF_INTERLEAVED.prefixed({"model.": "model.text_model."}, "decoder.").extended(_ROWS)
SPEC = image_text_family("smolvlm", [FORMAT], NAMES, SmolVLMImageProcessor)

__all__ = ["SPEC"]
