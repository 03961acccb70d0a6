"""Builders of Llama 4 with its vision tower, with the arguments of older recipes."""

from typing import Any

from torchtune.models._build import build
from torchtune.models._builders import Builder, LoraAttnModules, Part, adapt_parts, check_parts, dress
from torchtune.models._image_builders import image_part
from torchtune.models._spec import get_spec
from torchtune.modules.model_fusion import EarlyFusionModel

_PATCH = 200_092  # the token <|patch|>
_IMAGE_SIZE = "image_size: width and height of a tile, in pixels; must be the checkpoint's."
_DOC = """{title} with its vision tower.

    Args:
        decoder_trainable: whether to train the text decoder.
        encoder_trainable: whether to train the vision tower.
        fusion_trainable: whether to train its projector.
        {image_size}
    """
_LORA_DOC = """{title} with its vision tower and LoRA adapters.

    Args:
        lora_attn_modules: attention projections with an adapter, in the text decoder and in the tower.
        decoder_trainable: ``"lora"``: the text decoder has adapters; ``"frozen"``: it has none.
        encoder_trainable: the same for the vision tower.
        fusion_trainable: the same for its projector, with ``apply_lora_to_output``.
        apply_lora_to_mlp: whether the feed-forward projections and the experts have an adapter.
        apply_lora_to_output: whether the output projection and the projector have an adapter.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.
        {image_size}

    Raises:
        ModelError: a part is ``"full"``, which adapter files cannot store, or nothing would be trained.
    """


def early_fusion_builders(module: str, name: str, title: str, text_config: dict[str, Any]) -> dict[str, Builder]:
    """Make the builders ``name``, ``lora_name`` and ``qlora_name`` of a text decoder with the vision tower of Llama 4.

    Args:
        module: ``__name__`` of the module that exports them.
        name: name of the first function.
        title: beginning of the docstrings.
        text_config: ``config.json`` of the text decoder.
    """

    def full(
        decoder_trainable: bool = True,
        encoder_trainable: bool = False,
        fusion_trainable: bool = True,
        image_size: int = 336,
    ) -> EarlyFusionModel:
        spec = get_spec("llama4_vl")
        tower = {"hidden_size": 1408, "vision_output_dim": 4096, "image_size": image_size}
        built = build(spec.from_hf_config({"text_config": text_config, "vision_config": tower}), spec)
        trained = (decoder_trainable, encoder_trainable, fusion_trainable)
        model = EarlyFusionModel(built.decoder, {"vision": built.encoder}, {"vision": _PATCH}, *trained)
        model.description, model.spec = built.description, spec
        return model

    def lora_builder(builder_name: str, quantized: bool) -> Builder:
        def lora(
            lora_attn_modules: LoraAttnModules,
            *,
            decoder_trainable: Part = "lora",
            encoder_trainable: Part = "frozen",
            fusion_trainable: Part = "lora",
            apply_lora_to_mlp: bool = False,
            apply_lora_to_output: bool = False,
            lora_rank: int = 8,
            lora_alpha: float = 16,
            lora_dropout: float = 0.0,
            use_dora: bool = False,
            quantize_base: bool = quantized,
            image_size: int = 336,
        ) -> EarlyFusionModel:
            given = {
                "decoder_trainable": decoder_trainable,
                "encoder_trainable": encoder_trainable,
                "fusion_trainable": fusion_trainable,
            }
            check_parts(given, "lora", f"adapter files cannot store other weights: {name} trains them")
            parts = dict(zip(("language_model", "vision_tower", "projector"), given.values(), strict=True))
            if not apply_lora_to_output:
                parts["projector"] = "frozen"
            return adapt_parts(
                full(image_size=image_size),
                parts,
                lora_attn_modules,
                apply_lora_to_mlp,
                apply_lora_to_output,
                quantize_base,
                image_part,
                rank=lora_rank,
                alpha=lora_alpha,
                dropout=lora_dropout,
                use_dora=use_dora,
            )

        return dress(lora, builder_name, module, _LORA_DOC.format(title=title, image_size=_IMAGE_SIZE))

    return {
        name: dress(full, name, module, _DOC.format(title=title, image_size=_IMAGE_SIZE)),
        **{f"{way}_{name}": lora_builder(f"{way}_{name}", way == "qlora") for way in ("lora", "qlora")},
    }
