"""Gemma 4 with its vision tower: text and images.

The tower has the layers of the decoder, with learned positions of rows and columns; a token is the mean of its patches.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torchtune.data import DataError
from torchtune.models._build_vision import image_text_family
from torchtune.models._description import ImageTextDescription
from torchtune.models._hf_vision import ImageTextFormat
from torchtune.models._image_processors import ImageProcessor, Plan
from torchtune.models._weight_map import Row
from torchtune.models._weight_names import attention_names, gated_names, module_rows
from torchtune.models._weight_ops import Stack
from torchtune.models.gemma4 import FORMAT as TEXT_FORMAT
from torchtune.models.gemma4 import SPEC as TEXT


@dataclass(frozen=True, kw_only=True)
class GemmaImageProcessor(ImageProcessor):
    """Processor of images and videos of Gemma 4: every image gets about as many tokens, and every frame.

    Attributes:
        max_tokens: maximum number of tokens of an image.
        frame_tokens: maximum number of tokens of a frame of a video.
    """

    video_placeholder: ClassVar[str] = "<|video|>"
    around: ClassVar[tuple[str, str]] = ("<|image>", "<image|>")
    channels_last: ClassVar[bool] = True
    patch_size: int = 16
    merge: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    max_tokens: int = 280
    frame_tokens: int = 70

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> "GemmaImageProcessor":
        """See :meth:`ImageProcessor.from_config`."""
        frame_config = {"max_soft_tokens": cls.frame_tokens, **(config.get("video_processor") or {})}
        for settings in (config, frame_config):
            mean = settings.get("image_mean") or [0.0] * 3
            std = settings.get("image_std") or [1.0] * 3
            if settings.get("do_normalize") and (mean, std) != ([0.0] * 3, [1.0] * 3):
                raise DataError("do_normalize = True with colors of its own is not supported")
        # The tower itself maps colors to the range from -1 to 1, which is the mean and std of this class.
        colors = {"do_normalize": True, "image_mean": None, "image_std": None}
        processor = super().from_config({**config, **colors}, model)
        frame_processor = super().from_config({**frame_config, **colors}, model)
        return replace(processor, frame_tokens=frame_processor.max_tokens)

    @classmethod
    def read_sizes(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`ImageProcessor.read_sizes`."""
        return {
            "patch_size": config.get("patch_size"),
            "merge": config.get("pooling_kernel_size"),
            "max_tokens": config.get("max_soft_tokens"),
        }

    def plan(self, size: tuple[Any, ...]) -> Plan:
        """See :meth:`ImageProcessor.plan`; refuses an image so long that it would have no pixel left."""
        width, height, *video = size
        if not video:
            return self._plan(width, height, self.max_tokens)
        num_frames, fps = video
        texts = []
        for frame in range(num_frames):
            minutes, seconds = divmod(int(frame / fps), 60)
            space = " " if frame else ""
            texts.append(f"{space}{minutes:02d}:{seconds:02d} ")
        return self.plan_for_frames(self._plan(width, height, self.frame_tokens), texts)

    def _plan(self, width: int, height: int, tokens: int) -> Plan:
        """Return the plan of an image with the same aspect ratio and at most ``tokens`` tokens."""
        side = self.patch_size * self.merge  # of a token, in pixels
        scale = math.sqrt(tokens * side**2 / (height * width))
        rows = math.floor(scale * height / side)
        columns = math.floor(scale * width / side)
        if not rows and not columns:
            raise DataError(f"an image of {width} x {height} pixels cannot be resized to {tokens} tokens")
        if not rows:
            rows = 1
            columns = min(width // height, tokens)
        elif not columns:
            rows = min(height // width, tokens)
            columns = 1
        return self.plan_for_size(rows * side, columns * side)

    def layout(self, plan: Plan) -> str:
        """Return the text that replaces the placeholder of an image or a video."""
        if plan.texts:  # a video, whose frames have their time as text
            return self.frames_layout(plan, self.video_placeholder)
        return self.frames_layout(plan, "<|image|>")


def read_blocks(config: Mapping[str, Any], default: str | None = None) -> dict[str, Any]:
    """Read how text and images are combined; ``default`` is that of ``use_bidirectional_attention``."""
    text = config["text_config"]
    kind = text.get("use_bidirectional_attention", default)
    return {"pad_token": text.get("pad_token_id", 0), "image_blocks": kind == "vision"}


def _write_blocks(d: ImageTextDescription) -> dict[str, Any]:
    kind = "vision" if d.image_blocks else None
    return {"text_config": {"pad_token_id": d.pad_token, "use_bidirectional_attention": kind}}


FORMAT = ImageTextFormat(
    "Gemma4ForConditionalGeneration",
    "gemma4",
    TEXT_FORMAT,
    vision_type="gemma4_vision",
    tower_fields=(
        *ImageTextFormat.sizes(embed_dim=768, intermediate_dim=3072, num_layers=16, num_heads=12, patch_size=16),
        ("pooling_kernel_size", "merge", 3),
        ("position_embedding_size", "positions_side", 10_240),
        ("rms_norm_eps", "norm_eps", 1e-6),
        ("rms_norm_eps", "merge_norm_eps", 1e-6),
        ("use_clipped_linears", "clipped", False),
        ("standardize", "merge_standardized", False),
        ("hidden_activation", "activation", "gelu_pytorch_tanh"),
    ),
    tokens={"image_token_id": 258_880, "video_token_id": 258_884},
    fixed={
        "patch_bias": False,
        "attn_bias": False,
        "attn_output_bias": False,
        "mlp_bias": False,
        "mlp_gated": True,
        "post_norms": True,
        "head_norms": True,
        "attn_scale": 1.0,
        "merge_norm": "plain",
        "norm": "rms",
        "positions": "axes",
        "rope": "halves",
        "merge_pools": True,
        "projector_bias": False,
    },
    derived={"num_key_value_heads": "num_heads", "head_dim": "head_dim"},
    tower_unused=("max_position_embeddings", "layer_types", "default_output_length"),
    rope_base=100.0,
    tied=True,
    outer_unused=(
        "boi_token_id",
        "eoi_token_id",
        "boa_token_id",
        "eoa_token_id",
        "eoa_token_index",
        "audio_token_id",
        "audio_config",
        "vision_soft_tokens_per_image",
    ),
    read_more=read_blocks,
    write_more=_write_blocks,
)
_TOWER = "model.vision_tower."
_HF_LAYER = f"{_TOWER}encoder.layers.{{block}}."
_TUNE_LAYER = "encoder.layers.{block}."
_NORMS = (
    ("sa_norm", "input_layernorm"),
    ("sa_scale", "post_attention_layernorm"),
    ("mlp_norm", "pre_feedforward_layernorm"),
    ("mlp_scale", "post_feedforward_layernorm"),
    ("attn.q_norm", "self_attn.q_norm"),
    ("attn.k_norm", "self_attn.k_norm"),
)
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _linear_rows() -> list[Row]:
    """Make the rows of the linear layers, which clip their input and output in some towers."""
    rows = []
    for tune_name, external_name in (*attention_names(), *gated_names()):
        tune = f"{_TUNE_LAYER}{tune_name}"
        external = f"{_HF_LAYER}{external_name}"
        bounds = tuple(f"{external}.{bound}" for bound in _BOUNDS)
        rows += [
            Row(f"{external}.linear.weight", f"{tune}.weight", when="!vision.clipped"),
            Row(f"{external}.linear.weight", f"{tune}.linear.weight", when="vision.clipped"),
            Row(bounds, f"{tune}.bounds", Stack(), when="vision.clipped"),
        ]
    return rows


PROJECTOR = Row("model.embed_vision.embedding_projection.weight", "encoder.projector.mlp.weight")
_ROWS = [
    Row(f"{_TOWER}patch_embedder.input_proj.weight", "encoder.patch_embed.weight"),
    Row(f"{_TOWER}patch_embedder.position_embedding_table", "encoder.positions.tables"),
    *_linear_rows(),
    *module_rows(_HF_LAYER, _TUNE_LAYER, _NORMS, ["scale"]),
    Row(f"{_TOWER}std_bias", "encoder.projector.reduce.bias", when="vision.merge_standardized"),
    Row(f"{_TOWER}std_scale", "encoder.projector.reduce.scale", when="vision.merge_standardized"),
    PROJECTOR,
]
PREFIXES = {"model.": "model.language_model."}
SPEC = image_text_family(
    "gemma4_vl",
    [FORMAT],
    TEXT.weight_map().prefixed(PREFIXES, "decoder.").extended(_ROWS),
    GemmaImageProcessor,
    TEXT,
    untrained=("model.audio_tower.", "model.embed_audio."),
    layers_prefix="model.language_model.layers.",
)

__all__ = ["SPEC"]
