"""Gemma 4 without encoders (12B): text and images.

The pixels of a token are embedded, without a vision tower. As in the other models of Gemma 4, a token of an image sees
the later ones only in layers with a window. So does ``transformers`` 5.23 with static caches; otherwise, it has them
see these in all layers.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torchtune.models._build_vision import image_text_family
from torchtune.models._description import VisionDescription
from torchtune.models._hf_fields import Fields
from torchtune.models._weight_map import Row
from torchtune.models._weight_names import module_rows
from torchtune.models._weight_ops import SwappedAxes
from torchtune.models.gemma4_unified import FORMAT as TEXT_FORMAT
from torchtune.models.gemma4_unified import SPEC as TEXT
from torchtune.models.gemma4_vl import FORMAT as GEMMA4
from torchtune.models.gemma4_vl import PREFIXES, PROJECTOR, GemmaImageProcessor, read_blocks

_POOL = 3


class GemmaUnifiedImageProcessor(GemmaImageProcessor):
    """Processor of images and videos of Gemma 4 12B, whose patches become a token each."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: Mapping[str, Any]) -> GemmaImageProcessor:
        """See :meth:`ImageProcessor.from_config`."""
        processor = super().from_config(config, model)
        side = processor.patch_size * processor.merge
        return replace(processor, patch_size=side, merge=1, mean=(0.0,) * 3, std=(1.0,) * 3)


def _read(fields: Fields, values: dict[str, Any], outer_fields: Fields) -> dict[str, Any]:
    # A patch of the description is all patches of the file that become one token.
    return {"patch_size": fields.typed("patch_size", 16) * fields.typed("pooling_kernel_size", _POOL)}


def _write(v: VisionDescription) -> dict[str, Any]:
    return {"patch_size": v.patch_size // _POOL, "pooling_kernel_size": _POOL}


_FORMAT = replace(
    GEMMA4,
    architecture="Gemma4UnifiedForConditionalGeneration",
    model_type="gemma4_unified",
    text=TEXT_FORMAT,
    vision_type="gemma4_unified_vision",
    tower_fields=(
        ("mm_embed_dim", "embed_dim", 3840),
        ("mm_posemb_size", "positions_side", 1120),
        ("rms_norm_eps", "merge_norm_eps", 1e-6),
    ),
    fixed={
        "patch_norms": True,
        "first_norm": True,
        "norm_eps": 1e-5,
        "positions": "axes",
        "merge_norm": "plain",
        "projector_bias": False,
    },
    derived={"output_proj_dims": "embed_dim"},
    tower_unused=(),
    read_vision=_read,
    write_vision=_write,
    read_more=partial(read_blocks, default="vision"),
)
_EMBEDDER = "model.vision_embedder."
_MODULES = (
    ("patch_norm", "patch_ln1"),
    ("patch_embed", "patch_dense"),
    ("embed_norm", "patch_ln2"),
    ("first_norm", "pos_norm"),
)
_ROWS = [
    *module_rows(_EMBEDDER, "encoder.", _MODULES),
    Row(f"{_EMBEDDER}pos_embedding", "encoder.positions.tables", SwappedAxes()),
    PROJECTOR,
]
# Names of modules in transformers.
_INSIDE = ((_EMBEDDER, "model.embed_vision."), ("model.embed_vision.", "model.embed_vision.multimodal_embedder."))
SPEC = image_text_family(
    "gemma4_unified_vl",
    [_FORMAT],
    replace(TEXT.weight_map().prefixed(PREFIXES, "decoder.").extended(_ROWS), modules=_INSIDE),
    GemmaUnifiedImageProcessor,
    TEXT,
    untrained=("model.embed_audio.",),
    layers_prefix="model.language_model.layers.",
)

__all__ = ["SPEC"]
