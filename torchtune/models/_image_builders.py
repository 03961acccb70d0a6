"""Builders of vision-language models from a checkpoint's ``config.json``, with a choice of the parts to train."""

from pathlib import Path

from torchtune.models._builders import LoraAttnModules, Part, adapt_parts, check_parts
from torchtune.models._description import ModelError
from torchtune.models._from_hf_config import from_hf_config
from torchtune.modules.model_fusion import ImageTextModel


def image_part(path: str) -> str:
    """Return the part of a model that a parameter or module belongs to, from its dotted path."""
    if path.startswith("decoder."):
        return "language_model"
    return "projector" if "projector" in path else "vision_tower"


def image_text_model(
    checkpoint_dir: str | Path,
    vision_tower: Part = "frozen",
    projector: Part = "full",
    language_model: Part = "full",
) -> ImageTextModel:
    """Build a vision-language model with image tokens from the ``config.json`` of its checkpoint.

    Args:
        checkpoint_dir: folder of the checkpoint.
        vision_tower: ``"full"`` trains the vision tower, ``"frozen"`` does not.
        projector: as ``vision_tower``, for the projector of the tower's output, including DeepStack projectors.
        language_model: as ``vision_tower``, for the text decoder.

    Raises:
        ModelError: the model is a text model, a part is ``"lora"``, or all parts are frozen; further cases in
            :func:`from_hf_config`.

    Example:
        >>> torchtune.models.image_text_model(checkpoint)
        Traceback (most recent call last):
        ...
        torchtune.models._description.ModelError: ... has a model of text: use from_hf_config, or ...
    """
    model = _build(checkpoint_dir)
    parts = {"vision_tower": vision_tower, "projector": projector, "language_model": language_model}
    check_parts(parts, "full", "lora_image_text_model has adapters")
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:  # otherwise it is a constant of the checkpoint
            parameter.requires_grad_(parts[image_part(path)] == "full")
    return model


def lora_image_text_model(
    checkpoint_dir: str | Path,
    lora_attn_modules: LoraAttnModules,
    vision_tower: Part = "frozen",
    projector: Part = "frozen",
    language_model: Part = "lora",
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> ImageTextModel:
    """Build a vision-language model with LoRA adapters from the ``config.json`` of its checkpoint.

    Args:
        checkpoint_dir: folder of the checkpoint.
        lora_attn_modules: attention projections with an adapter, in the tower and in the text decoder.
        vision_tower: ``"lora"``: the vision tower has adapters; ``"frozen"``: it has none.
        projector: as ``vision_tower``, for all linear layers of the projector.
        language_model: as ``vision_tower``, for the text decoder.
        apply_lora_to_mlp: whether the feed-forward projections have an adapter.
        apply_lora_to_output: whether the output projection has an adapter; it must not be tied to the embeddings.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters are scaled by ``lora_alpha / lora_rank``.
        lora_dropout: dropout probability of the adapters' input.
        use_dora: train the magnitude of the adapted weights separately (DoRA).
        quantize_base: quantize the frozen base weights to NF4.

    Raises:
        ModelError: the model is a text model, a part is ``"full"``, which adapter files cannot store, or all parts are
            frozen; further cases in :func:`from_hf_config`.
    """
    model = _build(checkpoint_dir)
    parts = {"vision_tower": vision_tower, "projector": projector, "language_model": language_model}
    check_parts(parts, "lora", "adapter files cannot store other weights: image_text_model trains them")
    return adapt_parts(
        model,
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


def _build(checkpoint_dir: str | Path) -> ImageTextModel:
    model = from_hf_config(checkpoint_dir, images=True)
    if not isinstance(model, ImageTextModel):
        raise ModelError(f"{checkpoint_dir} has a model of text: use from_hf_config, or the builder of its size.")
    return model
