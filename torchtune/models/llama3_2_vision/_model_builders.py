"""Sizes of Llama 3.2 Vision."""

from dataclasses import replace
from functools import partial

from torchtune._lazy import former_names
from torchtune.models._build_vision import Part, check_parts
from torchtune.models._builders import Builder, LoraAttnModules, named_function
from torchtune.models._description import ModelError
from torchtune.models._rope_scaling import Llama3RopeScaling
from torchtune.models._spec import ModelSpec
from torchtune.models.llama3_2_vision._component_builders import build_vision
from torchtune.models.llama3_2_vision._description import VisionDescription
from torchtune.models.llama3_2_vision._hf_config import read, write
from torchtune.models.llama3_2_vision._lora import adapt
from torchtune.models.llama3_2_vision._weight_map import HF, HF_MODULES, META_FILES
from torchtune.modules.model_fusion import DeepFusionModel

SPEC = ModelSpec(
    name="llama3_2_vision",
    architectures=("MllamaForConditionalGeneration",),
    from_hf_config=read,
    to_hf_config=write,
    weight_maps={"hf": HF, "meta": META_FILES, "hf_modules": HF_MODULES},
    model_types=("LLAMA3_VISION",),
    builder=build_vision,
)

_11B = VisionDescription(
    vocab_size=128_256,
    num_layers=32,
    embed_dim=4096,
    intermediate_dim=14_336,
    max_seq_len=131_072,
    num_heads=32,
    num_kv_heads=8,
    rope_base=500_000.0,
    rope_scaling=Llama3RopeScaling(),
    fusion_layers=tuple(range(3, 32, 4)),
    tile_size=560,
    clip_dim=1280,
    num_clip_layers=32,
    num_clip_heads=16,
    clip_hidden_states=(3, 7, 15, 23, 30),
    num_projection_layers=8,
)
SIZES = {
    "llama3_2_vision_11b": _11B,
    "llama3_2_vision_90b": replace(
        _11B,
        num_layers=80,
        embed_dim=8192,
        intermediate_dim=28_672,
        num_heads=64,
        head_dim=128,
        rope_dim=128,
        fusion_layers=tuple(range(3, 80, 4)),
    ),
}


_DOC = """Build Llama 3.2 Vision {size}.

    Args:
        decoder_trainable: whether to train the text decoder.
        encoder_trainable: whether to train CLIP, the image encoder.
        fusion_trainable: whether to train cross-attention, projection head and special tokens.
        image_size: width and height of a tile, in pixels; must be the checkpoint's.
    """
_LORA_DOC = """Build Llama 3.2 Vision {size} with LoRA adapters.

    Args:
        lora_attn_modules: attention projections with an adapter.
        decoder_trainable: ``"lora"``: the text decoder has adapters; ``"frozen"``: it has none.
        encoder_trainable: the same for CLIP, the image encoder.
        fusion_trainable: the same for cross-attention and projection head.
        apply_lora_to_mlp: whether the feed-forward projections have an adapter.
        apply_lora_to_output: whether the output projections of decoder and projection head have an adapter.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.
        image_size: width and height of a tile, in pixels; must be the checkpoint's.

    Raises:
        ModelError: a part is ``"full"``, which adapter files cannot store, or no part is ``"lora"``.
    """


def _builders(name: str, size: str) -> tuple[Builder, Builder]:
    """Make the builders of a size, without and with LoRA adapters."""

    def full(
        decoder_trainable: bool = False,
        encoder_trainable: bool = True,
        fusion_trainable: bool = True,
        image_size: int = 560,
    ) -> DeepFusionModel:
        parts = {
            "decoder_trainable": decoder_trainable,
            "encoder_trainable": encoder_trainable,
            "fusion_trainable": fusion_trainable,
        }
        for part, trains in parts.items():
            if not isinstance(trains, bool):
                raise ModelError(f"{part} is {trains!r}, but it must be True or False (adapters: lora_{name}).")
        return build_vision(replace(SIZES[name], tile_size=image_size), SPEC, **parts)

    def lora(
        lora_attn_modules: LoraAttnModules,
        decoder_trainable: Part = "frozen",
        encoder_trainable: Part = "lora",
        fusion_trainable: Part = "lora",
        apply_lora_to_mlp: bool = False,
        apply_lora_to_output: bool = False,
        lora_rank: int = 8,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        use_dora: bool = False,
        quantize_base: bool = False,
        image_size: int = 560,
    ) -> DeepFusionModel:
        parts = {
            "decoder_trainable": decoder_trainable,
            "encoder_trainable": encoder_trainable,
            "fusion_trainable": fusion_trainable,
        }
        check_parts(parts, "lora", f"adapter files cannot store other weights: {name} trains them")
        return adapt(
            build_vision(replace(SIZES[name], tile_size=image_size), SPEC),
            {part.removesuffix("_trainable"): way == "lora" for part, way in parts.items()},
            lora_attn_modules,
            apply_lora_to_mlp,
            apply_lora_to_output,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            use_dora=use_dora,
            quantize_base=quantize_base,
        )

    return (
        named_function(full, name, __name__, _DOC.format(size=size)),
        named_function(lora, f"lora_{name}", __name__, _LORA_DOC.format(size=size)),
    )


llama3_2_vision_11b, lora_llama3_2_vision_11b = _builders("llama3_2_vision_11b", "11B")
llama3_2_vision_90b, lora_llama3_2_vision_90b = _builders("llama3_2_vision_90b", "90B")
qlora_llama3_2_vision_11b = partial(lora_llama3_2_vision_11b, quantize_base=True)
qlora_llama3_2_vision_90b = partial(lora_llama3_2_vision_90b, quantize_base=True)

__getattr__ = former_names(__name__)
