"""Mistral 3 and Ministral 3 with Pixtral's vision tower, and Pixtral 12B: text and images.

The tower rotates channels by row and column, so that it takes images of any size; a token ends each row of an image
(https://arxiv.org/abs/2410.07073).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchtune.data import DataError
from torchtune.models._build_vision import image_text_family
from torchtune.models._description import ImageTextDescription
from torchtune.models._hf_config import MISTRAL
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_vision import ImageTextFormat
from torchtune.models._image_processors import ImageProcessor, Plan
from torchtune.models._weight_map import Row
from torchtune.models._weight_names import HF_INTERLEAVED, attention_names, gated_names, module_rows
from torchtune.models._weight_ops import FlatPatches
from torchtune.models.ministral3 import FORMAT as MINISTRAL


@dataclass(frozen=True, kw_only=True)
class PixtralImageProcessor(ImageProcessor):
    """Image processor of Mistral 3, Ministral 3 and Pixtral.

    Attributes:
        longest: largest side of an image; larger ones are reduced.
    """

    patch_size: int = 16
    merge: int = 2
    longest: int = 1024

    @classmethod
    def read_sizes(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.read_sizes`."""
        patch_size = config.get("patch_size")
        if isinstance(patch_size, Mapping):
            patch_size = patch_size.get("height")
        merge = None  # the default of this class
        if model.get("model_type") == "llava":  # Pixtral, whose patches are tokens
            merge = 1
        return {
            "patch_size": patch_size,
            "merge": model.get("spatial_merge_size", merge),
            "longest": (config.get("size") or {}).get("longest_edge"),
        }

    def plan(self, size: tuple[int, int]) -> Plan:
        """See :meth:`ImageProcessor.plan`; refuses an image so long that it would have no pixel left."""
        width, height = size
        factor = self.patch_size * self.merge
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise DataError(f"an image of {size[0]} x {size[1]} pixels is too long: reduced, it has no pixel left")
        rows = math.ceil(height / factor)
        columns = math.ceil(width / factor)
        return self.plan_for_size(rows * factor, columns * factor)

    def layout(self, plan: Plan) -> str:
        """Return the text that replaces the placeholder of an image."""
        _, patch_rows, patch_columns = plan.grids[0]
        rows = patch_rows // self.merge
        columns = patch_columns // self.merge
        return "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"


_FEATURES = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}


def _read(
    fields: Fields, values: dict[str, Any], outer_fields: Fields, required: Collection[str] = ()
) -> dict[str, Any]:
    for name in required:
        if not outer_fields.has(name):  # transformers has other defaults
            raise outer_fields.refusal(name, None)
    if fields.peek("model_type") not in (None, "pixtral"):
        raise fields.refusal("model_type", fields.peek("model_type"))
    outer_fields.require(projector_hidden_act="gelu", **_FEATURES)
    return {"projector_dim": values["output_dim"]}


_TEXT_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
}
_FIXED = {
    "patch_bias": False,
    "attn_bias": False,
    "attn_output_bias": False,
    "mlp_bias": False,
    "mlp_gated": True,
    "first_norm": True,
    "norm": "rms",
    "norm_eps": 1e-5,
    "rope": "alternating",
}
_FORMAT = ImageTextFormat(
    "Mistral3ForConditionalGeneration",
    "mistral3",
    replace(MISTRAL, defaults=_TEXT_DEFAULTS),
    vision_type="pixtral",
    tower_fields=(
        *ImageTextFormat.sizes(embed_dim=1024, intermediate_dim=4096, num_layers=24, num_heads=16, patch_size=16),
        ("num_channels", "num_channels", 3),
        ("hidden_act", "activation", "gelu"),
    ),
    outer_fields=(("spatial_merge_size", "merge", 2), ("multimodal_projector_bias", "projector_bias", False)),
    tokens={"image_token_index": 10},
    fixed={**_FIXED, "merge_channels_first": True, "merge_reduces": True, "merge_norm": "rms"},
    derived={"head_dim": "head_dim"},
    tower_unused=("image_size",),  # rotary embeddings have no largest size
    read_vision=_read,
    outer_unused=("image_token_id", "image_seq_length"),
)


def _write_features(d: ImageTextDescription) -> dict[str, Any]:  # not a lambda, because descriptions are pickled
    return _FEATURES


_LLAVA_FORMAT = replace(
    _FORMAT,
    architecture="LlavaForConditionalGeneration",
    model_type="llava",
    text=MISTRAL,
    outer_fields=(("multimodal_projector_bias", "projector_bias", True),),
    fixed=_FIXED,
    read_vision=partial(_read, required=tuple(_FEATURES)),
    write_more=_write_features,
)
_TOWER = "vision_tower."
_PROJECTOR = "multi_modal_projector."
_HF_LAYER = f"{_TOWER}transformer.layers.{{block}}."
_TUNE_LAYER = "encoder.layers.{block}."
_REDUCES = "vision.merge_reduces"
_LINEARS = [("mlp.w1", "linear_1"), ("mlp.w2", "linear_2")]
_ROWS = [
    Row(f"{_TOWER}patch_conv.weight", "encoder.patch_embed.weight", FlatPatches()),
    Row(f"{_TOWER}ln_pre.weight", "encoder.first_norm.scale"),
    *module_rows(_HF_LAYER, _TUNE_LAYER, [*attention_names("attention"), *gated_names("feed_forward")], ["weight"]),
    *module_rows(_HF_LAYER, _TUNE_LAYER, [("sa_norm", "attention_norm"), ("mlp_norm", "ffn_norm")], ["scale"]),
    Row(f"{_PROJECTOR}norm.weight", "encoder.projector.norm.scale", when=_REDUCES),
    Row(f"{_PROJECTOR}patch_merger.merging_layer.weight", "encoder.projector.reduce.weight", when=_REDUCES),
    *module_rows(_PROJECTOR, "encoder.projector.", _LINEARS, ["weight"]),
    *module_rows(_PROJECTOR, "encoder.projector.", _LINEARS, ["bias"], "vision.projector_bias"),
]
_TEXT = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
_MODULES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
SPEC = image_text_family(
    "mistral3",
    (_FORMAT, replace(_FORMAT, text=MINISTRAL), _LLAVA_FORMAT),
    replace(HF_INTERLEAVED.prefixed(_TEXT, "decoder.").extended(_ROWS), modules=_MODULES),
    PixtralImageProcessor,
)

__all__ = ["SPEC"]
