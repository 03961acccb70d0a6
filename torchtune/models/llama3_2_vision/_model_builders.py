"""The sizes of Llama 3.2 Vision."""

from dataclasses import replace
from functools import partial
from typing import Literal

from torchtune.models._builders import LoraAttnModules
from torchtune.models._description import ModelError
from torchtune.models._rope_scaling import Llama3RopeScaling
from torchtune.models._spec import ModelSpec
from torchtune.models.llama3_2_vision._component_builders import build_vision
from torchtune.models.llama3_2_vision._description import VisionDescription
from torchtune.models.llama3_2_vision._hf_config import read, write
from torchtune.models.llama3_2_vision._lora import adapt
from torchtune.models.llama3_2_vision._weight_map import HF, HF_MODULES, META_FILES
from torchtune.modules.model_fusion import DeepFusionModel

Part = Literal["frozen", "lora", "full"]

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


def llama3_2_vision_11b(
    decoder_trainable: bool = False,
    encoder_trainable: bool = True,
    fusion_trainable: bool = True,
    image_size: int = 560,
) -> DeepFusionModel:
    """Build Llama 3.2 Vision 11B.

    Args:
        decoder_trainable: whether the text decoder is trained.
        encoder_trainable: whether CLIP, the image encoder, is trained.
        fusion_trainable: whether cross-attention, projection head and special tokens are trained.
        image_size: width and height of a tile, in pixels, as the checkpoint has it.
    """
    return _build("llama3_2_vision_11b", decoder_trainable, encoder_trainable, fusion_trainable, image_size)


def llama3_2_vision_90b(
    decoder_trainable: bool = False,
    encoder_trainable: bool = True,
    fusion_trainable: bool = True,
    image_size: int = 560,
) -> DeepFusionModel:
    """Build Llama 3.2 Vision 90B; for the arguments see :func:`llama3_2_vision_11b`."""
    return _build("llama3_2_vision_90b", decoder_trainable, encoder_trainable, fusion_trainable, image_size)


def _build(name: str, decoder: bool, encoder: bool, fusion: bool, image_size: int) -> DeepFusionModel:
    parts = {"decoder_trainable": decoder, "encoder_trainable": encoder, "fusion_trainable": fusion}
    for part, trains in parts.items():
        if not isinstance(trains, bool):
            raise ModelError(f"{part} is {trains!r}, but it must be True or False (adapters: lora_{name}).")
    return build_vision(replace(SIZES[name], tile_size=image_size), SPEC, **parts)


def lora_llama3_2_vision_11b(
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
    """Build Llama 3.2 Vision 11B with LoRA adapters.

    Args:
        lora_attn_modules: attention projections with an adapter.
        decoder_trainable: ``"lora"`` adapts the text decoder, ``"frozen"`` does not.
        encoder_trainable: the same of CLIP, the image encoder.
        fusion_trainable: the same of cross-attention and projection head.
        apply_lora_to_mlp: whether the feed-forward projections have an adapter.
        apply_lora_to_output: whether the output projections of decoder and projection head have one.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.
        image_size: width and height of a tile, in pixels, as the checkpoint has it.

    Raises:
        ModelError: a part is ``"full"``, which an adapter's file cannot hold, or none is ``"lora"``.
    """
    return _adapted("llama3_2_vision_11b", **locals())


def lora_llama3_2_vision_90b(
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
    """Build Llama 3.2 Vision 90B with LoRA adapters; for the arguments see :func:`lora_llama3_2_vision_11b`."""
    return _adapted("llama3_2_vision_90b", **locals())


qlora_llama3_2_vision_11b = partial(lora_llama3_2_vision_11b, quantize_base=True)
qlora_llama3_2_vision_90b = partial(lora_llama3_2_vision_90b, quantize_base=True)


def _adapted(
    name: str,
    *,
    lora_attn_modules: LoraAttnModules,
    decoder_trainable: Part,
    encoder_trainable: Part,
    fusion_trainable: Part,
    apply_lora_to_mlp: bool,
    apply_lora_to_output: bool,
    lora_rank: int,
    lora_alpha: float,
    lora_dropout: float,
    use_dora: bool,
    quantize_base: bool,
    image_size: int,
) -> DeepFusionModel:
    parts = {"decoder": decoder_trainable, "encoder": encoder_trainable, "fusion": fusion_trainable}
    for part, way in parts.items():
        if way == "full":
            raise ModelError(
                f"{part}_trainable is 'full', but beside adapters nothing else is trained or saved: choose 'lora' or "
                f"'frozen', or train {name} with a full_finetune recipe."
            )
        if way not in ("frozen", "lora"):
            raise ModelError(f"{part}_trainable is {way!r}: choose 'lora' or 'frozen'.")
    return adapt(
        build_vision(replace(SIZES[name], tile_size=image_size), SPEC),
        {part: way == "lora" for part, way in parts.items()},
        lora_attn_modules,
        apply_lora_to_mlp,
        apply_lora_to_output,
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        use_dora=use_dora,
        quantize_base=quantize_base,
    )
