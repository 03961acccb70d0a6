"""Qwen 3-VL, dense and with experts: text and images.

Outputs of three layers of the tower are added in the first layers of the decoder (DeepStack,
https://arxiv.org/abs/2406.04334). The decoder rotates channels by time, row and column of a patch, which alternate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torchtune.data import DataError
from torchtune.models._build_vision import image_text_family
from torchtune.models._description import VisionDescription
from torchtune.models._hf_config import QWEN3, HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_layers import read_qwen_experts, write_qwen_experts
from torchtune.models._hf_vision import ImageTextFormat
from torchtune.models._image_processors import ImageProcessor, Plan
from torchtune.models._weight_map import Row
from torchtune.models._weight_names import HF_HALF, experts, module_rows, with_fused_experts
from torchtune.models._weight_ops import FlatPatches, Split

_MOST_ASPECT = 200


@dataclass(frozen=True, kw_only=True)
class QwenImageProcessor(ImageProcessor):
    """Processor of images and videos of Qwen 2.5-VL, Qwen 3-VL and Qwen 3.5.

    Attributes:
        min_pixels: images with fewer pixels are enlarged.
        max_pixels: images with more pixels are reduced.
        video: processor with the limits of videos, for each frame or, without ``tokens_per_second``, for all frames;
            by default this one.
        token: id of the placeholder, one for each token of an image.
        tokens_per_second: distance of positions after a second of a video (Qwen 2.5-VL); 0: the time is in the text.
    """

    video_placeholder: ClassVar[str] = "<|video_pad|>"
    around: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
    patch_size: int = 14
    merge: int = 2
    frames: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    video: "QwenImageProcessor | None" = None
    token: int = 0
    tokens_per_second: float = 0.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> "QwenImageProcessor":
        """See :meth:`ImageProcessor.from_config`."""
        processor = replace(super().from_config(config, model), token=model.get("image_token_id", 0))
        if model.get("model_type") == "qwen2_5_vl":
            tower = model.get("vision_config") or {}
            processor = replace(processor, tokens_per_second=tower.get("tokens_per_second", 4))
        video_config = config.get("video_processor")
        if not video_config:
            return processor
        video = cls.from_config(video_config, model)
        if video_config.get("cap_pixels_per_frame") or video.colors != processor.colors:
            raise DataError("cap_pixels_per_frame, and colors that differ from those of images, are not supported")
        return replace(processor, video=video)

    @classmethod
    def read_sizes(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.read_sizes`."""
        size = config.get("size") or {}
        return {
            "patch_size": config.get("patch_size"),
            "merge": config.get("merge_size"),
            "frames": config.get("temporal_patch_size"),
            "min_pixels": config.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": config.get("max_pixels") or size.get("longest_edge"),
        }

    def plan(self, size: tuple[Any, ...]) -> Plan:
        """See :meth:`ImageProcessor.plan`; refuses an image with one side more than 200 times the other."""
        width, height, *video = size
        if not video:
            return self.plan_for_size(*self._resized(width, height))
        num_frames, fps = video
        # The limits of pixels are for each frame, or for all frames together.
        limited_frames = 1 if self.tokens_per_second else num_frames
        # As in transformers, the frames of a video with a shorter side than a token are enlarged to it beforehand.
        scale = self.patch_size * self.merge / min(width, height)
        if limited_frames > 1 and scale > 1:
            width = int(width * scale)
            height = int(height * scale)
        plan = self.plan_for_size(*(self.video or self)._resized(width, height, limited_frames))
        texts = []
        for first in range(0, num_frames, self.frames):
            last = min(first + self.frames, num_frames) - 1  # the last patch may have fewer frames
            time = (first / fps + last / fps) / 2  # in seconds, the middle of the patch's frames
            texts.append(f"<{time:.1f} seconds>")
        plan = self.plan_for_frames(plan, texts)
        if not self.tokens_per_second:
            return plan
        # All tokens follow one another without texts: the positions say how much time passes between frames.
        return plan._replace(texts=("",), step=self.tokens_per_second * (self.frames / fps))

    def _resized(self, width: int, height: int, num_frames: int = 1) -> tuple[int, int]:
        """Return height and width after resizing, with the limits for ``num_frames`` frames."""
        if max(height, width) > _MOST_ASPECT * min(height, width):
            raise DataError(f"an image of {width} x {height} pixels is too long: its sides may differ by 200 times")
        side = self.patch_size * self.merge  # of a token, in pixels
        rows = round(height / side)
        columns = round(width / side)
        num_pixels = rows * columns * side**2 * max(round(num_frames / self.frames) * self.frames, 1)
        if num_pixels > self.max_pixels:
            scale = math.sqrt((num_frames * height * width) / self.max_pixels)
            rows = max(1, math.floor(height / scale / side))
            columns = max(1, math.floor(width / scale / side))
        elif num_pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (num_frames * height * width))
            rows = math.ceil(height * scale / side)
            columns = math.ceil(width * scale / side)
        return rows * side, columns * side

    def layout(self, plan: Plan) -> list[int] | str:
        """Return the tokens, or the text, that replace the placeholder of an image or a video."""
        if plan.texts:
            return self.frames_layout(plan, self.video_placeholder)
        return [self.token] * plan.tokens


# Fields of a tower: (name in the file, name in the description, default of transformers).
TOWER_FIELDS = (
    ("depth", "num_layers", 27),
    ("hidden_size", "embed_dim", 1152),
    ("intermediate_size", "intermediate_dim", 4304),
    ("num_heads", "num_heads", 16),
    ("in_channels", "num_channels", 3),
    ("patch_size", "patch_size", 16),
    ("temporal_patch_size", "frames_per_patch", 2),
    ("spatial_merge_size", "merge", 2),
    ("out_hidden_size", "output_dim", 3584),
    ("hidden_act", "activation", "gelu_pytorch_tanh"),
)


def _read(fields: Fields, values: dict[str, Any], outer_fields: Fields, deep_layers: list[int]) -> dict[str, Any]:
    table = fields.typed("num_position_embeddings", 2304)
    side = round(table**0.5)
    if side * side != table:
        raise fields.refusal("num_position_embeddings", table)
    return {
        "positions_side": side,
        "projector_dim": values["embed_dim"] * values["merge"] ** 2,
        "deep_layers": tuple(fields.list_of("deepstack_visual_indexes", 27, int, deep_layers)),
    }


def _write(v: VisionDescription) -> dict[str, Any]:
    return {"num_position_embeddings": v.positions_side**2, "deepstack_visual_indexes": list(v.deep_layers)}


def qwen_format(
    architecture: str, model_type: str, text: HFFormat, deep_layers: list[int], **more: Any
) -> ImageTextFormat:
    """Make the format of Qwen 3-VL and Qwen 3.5.

    Args:
        architecture: as in :class:`ImageTextFormat`; likewise ``model_type``, ``text`` and ``more``.
        deep_layers: default of ``deepstack_visual_indexes``.
    """
    return ImageTextFormat(
        architecture,
        model_type,
        text,
        vision_type=f"{model_type}_vision",
        tower_fields=TOWER_FIELDS,
        fixed={"positions": "interpolated", "rope": "axial", "merge_norm": "layer", "merge_norm_eps": 1e-6},
        read_vision=partial(_read, deep_layers=deep_layers),
        write_vision=_write,
        **more,
    )


# Names of modules: (ours, Hugging Face's).
_LAYER = (
    ("sa_norm", "norm1"),
    ("mlp_norm", "norm2"),
    ("attn.output_proj", "attn.proj"),
    ("mlp.w1", "mlp.linear_fc1"),
    ("mlp.w2", "mlp.linear_fc2"),
)
_MERGER = (("mlp.w1", "linear_fc1"), ("mlp.w2", "linear_fc2"))


def fused_qkv(external_layer: str, tune_layer: str) -> list[Row]:
    """Make the rows of the fused projection of queries, keys and values in layers of a tower."""
    split = Split(("vision.embed_dim",) * 3)
    rows = []
    for parameter in ("weight", "bias"):
        parts = tuple(f"{tune_layer}attn.{name}_proj.{parameter}" for name in "qkv")
        rows.append(Row(f"{external_layer}attn.qkv.{parameter}", parts, split))
    return rows


def tower_names() -> list[Row]:
    """Make the rows of a tower."""
    external_layer = "model.visual.blocks.{block}."
    tune_layer = "encoder.layers.{block}."
    merger = [("norm", "norm"), *_MERGER]
    deep_merger = [("merged_norm", "norm"), *_MERGER]
    return [
        Row("model.visual.patch_embed.proj.weight", "encoder.patch_embed.weight", FlatPatches()),
        Row("model.visual.patch_embed.proj.bias", "encoder.patch_embed.bias"),
        Row("model.visual.pos_embed.weight", "encoder.positions.table.weight"),
        *fused_qkv(external_layer, tune_layer),
        *module_rows(external_layer, tune_layer, _LAYER),
        *module_rows("model.visual.merger.", "encoder.projector.", merger),
        *module_rows("model.visual.deepstack_merger_list.{deep}.", "encoder.deep_projectors.{deep}.", deep_merger),
    ]


_DENSE = replace(
    QWEN3,
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl_text",
    windows="none",
    ropes=("sections",),
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
)


_MOE = replace(
    _DENSE,
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe_text",
    extra_fields=(
        ("num_experts_per_tok", "experts_per_token", 4),
        ("moe_intermediate_size", "expert_dim", 1408),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    fixed={"router_normalize": True},
    unused=("norm_topk_prob",),  # transformers always normalizes
    read_more=partial(read_qwen_experts, num_experts=60),
    write_more=write_qwen_experts,
    defaults={"num_key_value_heads": 16, "max_position_embeddings": 128_000, "rope_theta": 500_000.0},
)
_QWEN3_VL = {
    "deep_layers": [8, 16, 24],
    "tokens": {"image_token_id": 151_655, "video_token_id": 151_656},
    "mrope_sections": (24, 20, 20),
}
_FORMATS = (
    qwen_format(_DENSE.architecture, "qwen3_vl", _DENSE, **_QWEN3_VL),
    qwen_format(_MOE.architecture, "qwen3_vl_moe", _MOE, **_QWEN3_VL),
)
_EXPERTS = experts(HF_HALF, "mlp", "gate_proj", "up_proj", "down_proj")
_TEXT = with_fused_experts(_EXPERTS, "mlp", both=True).prefixed({"model.": "model.language_model."}, "decoder.")
SPEC = image_text_family("qwen3_vl", _FORMATS, _TEXT.extended(tower_names()), QwenImageProcessor)

__all__ = ["SPEC"]
