"""Build a model from the ``config.json`` of its checkpoint, also the text decoder of a composite model."""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from torchtune.models._build import build
from torchtune.models._description import ModelError
from torchtune.models._hf_fields import architecture_of, format_value
from torchtune.models._spec import spec_for_architecture
from torchtune.modules.transformer import TransformerDecoder
from torchtune.utils import local_path, read_json

# model_type of text_config -> architecture of the text-only model.
_TEXT_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
# Composite models that are always built completely.
_COMPOSITE_ONLY = (
    "MllamaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
# Fields of the composite config that also apply to the text decoder.
_SHARED_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
# Layouts: name prefix in a text-only checkpoint -> prefix in the composite checkpoint.
_LAYOUTS: tuple[Mapping[str, str], ...] = (
    {"model.": "model.language_model.", "lm_head.": "lm_head."},
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "model.text_model.", "lm_head.": "lm_head."},
)
# The two names of RoPE's settings in config.json, before and since transformers 5.
_ROPE_FIELDS = ("rope_scaling", "rope_parameters")
# Names of dtypes in config.json.
_STORED_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def text_prefixes(names: Iterable[str]) -> dict[str, str]:
    """Find the text decoder in a composite checkpoint.

    Args:
        names: all tensor names of the checkpoint.

    Returns:
        Name prefix in a text-only checkpoint -> prefix in this checkpoint. Empty if the checkpoint is text-only, or if
        its decoder has cross-attention to the other parts and so cannot be used alone.

    Example:
        >>> torchtune.models.text_prefixes(["model.language_model.norm.weight", "lm_head.weight"])["model."]
        'model.language_model.'
    """
    names = list(names)
    if any(".cross_attn." in name for name in names):
        return {}
    for layout in _LAYOUTS:
        if any(name.startswith(layout["model."]) for name in names):
            prefixes = dict(layout)
            if any(name.startswith("lm_head.") for name in names):  # the output projection is outside of the decoder
                prefixes["lm_head."] = "lm_head."
            return prefixes
    return {}


def module_prefixes(prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return the module prefixes in ``transformers``, which names in ``peft`` begin with; not for Llama 4.

    Args:
        prefixes: tensor name prefixes from :func:`text_prefixes`; in older checkpoints, module prefixes differ.

    Example:
        >>> torchtune.models.module_prefixes({"model.": "language_model.model."})["model."]
        'model.language_model.'
    """
    decoder = "text_model" if "text_model." in prefixes["model."] else "language_model"
    return {"model.": f"model.{decoder}.", "lm_head.": "lm_head."}


def text_config(config: Mapping[str, Any], images: bool = False) -> dict[str, Any]:
    """Return the config of the model to build: ``text_config`` of a composite ``config``, or ``config`` itself.

    Args:
        config: contents of a ``config.json``.
        images: whether to build a complete composite model, even if its text decoder can be built alone.

    Raises:
        ModelError: the text decoder is not supported, or ``architectures`` is not a list of names.
    """
    composite_only = architecture_of(config) in _COMPOSITE_ONLY
    text = config.get("text_config")
    quantization = config.get("quantization_config")
    if not isinstance(text, Mapping) or images or composite_only:
        complete_config = dict(config)
        # A format refuses quantized weights, except those that the checkpointer dequantizes before it sees them.
        if _is_readable(quantization):
            complete_config.pop("quantization_config", None)
        return complete_config
    text_type = text.get("model_type")
    if str(text_type) not in _TEXT_ARCHITECTURES:
        raise ModelError(
            f"config.json: a text tower of model_type = {format_value(text_type)} cannot be read; there are: "
            f"{', '.join(_TEXT_ARCHITECTURES)}."
        )
    decoder_config = dict(text)
    for name in _SHARED_FIELDS:
        if config.get(name) is not None:
            decoder_config[name] = config[name]
    if quantization and not _is_readable(quantization):  # for the format to refuse
        decoder_config["quantization_config"] = quantization
    decoder_config["architectures"] = [_TEXT_ARCHITECTURES[text_type]]
    return decoder_config


def _is_readable(quantization: object) -> bool:
    """Return whether checkpoints with this ``quantization_config`` can be dequantized when they are loaded."""
    if not isinstance(quantization, Mapping):
        return False
    method = quantization.get("quant_method")
    if method == "fp8":
        return quantization.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
    return method == "compressed-tensors"


def with_text_config(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the text decoder's config in a composite ``config``; the inverse of :func:`text_config`.

    Args:
        config: composite ``config.json``.
        text: ``config.json`` of the text decoder.

    Returns:
        ``config`` with ``text`` in ``text_config`` and the shared fields updated.
    """
    original_text = config["text_config"]
    text_config = {}
    for name, value in text.items():
        # Shared fields stay where the file had them.
        if name in original_text or name not in _SHARED_FIELDS:
            text_config[name] = value
    # The architecture of the decoder alone is not that of its part in the composite model.
    text_config.pop("architectures", None)
    if "architectures" in original_text:
        text_config["architectures"] = original_text["architectures"]
    composite = {**config, "text_config": text_config}
    for name in _SHARED_FIELDS:
        if name in config and name in text:
            composite[name] = text[name]
    composite.pop("quantization_config", None)  # exported weights are not quantized
    return composite


def override_fields(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace fields of a ``config.json``; RoPE's settings keep the ``rope_theta`` of the file.

    Args:
        config: contents of the file, or of its ``text_config``.
        overrides: new values by field. ``rope_scaling`` and ``rope_parameters`` are two names of one field; the file
            need not have it.

    Raises:
        ModelError: a field is not in the file, or RoPE's settings are no object.

    Example:
        >>> from torchtune.models._from_hf_config import override_fields
        >>> override_fields({"hidden_size": 8, "rope_theta": 1e4}, {"rope_scaling": {"rope_type": "linear"}})
        {'hidden_size': 8, 'rope_theta': 10000.0, 'rope_scaling': {'rope_type': 'linear'}}
    """
    overridden = dict(config)
    for name, value in overrides.items():
        if name in _ROPE_FIELDS:
            if not isinstance(value, Mapping):
                raise ModelError(
                    f"config_overrides: {name} is {format_value(value)}: give an object, such as "
                    "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}."
                )
            # The name in the file counts, because a reader takes only one of the two.
            field = "rope_scaling"
            if config.get("rope_parameters") and not config.get("rope_scaling"):
                field = "rope_parameters"
            settings = dict(config.get(field) or {})
            if any(isinstance(setting, Mapping) for setting in settings.values()):
                raise ModelError(
                    f"config_overrides: {field} of this model differs by kind of layer, and cannot be overridden: "
                    "change it in config.json."
                )
            # The scaling is replaced as a whole; base and rotated fraction are the model's.
            base = {key: settings[key] for key in ("rope_theta", "partial_rotary_factor") if key in settings}
            overridden[field] = {**base, **value}
        elif name in config:
            overridden[name] = value
        else:
            nearest = get_close_matches(name, [*config, *_ROPE_FIELDS], n=1, cutoff=0.5)
            hint = f"did you mean '{nearest[0]}'?" if nearest else "see the fields of config.json."
            raise ModelError(f"config_overrides: config.json has no field '{name}'; {hint}")
    return overridden


def from_hf_config(
    checkpoint_dir: str | Path,
    ignore_fields: Collection[str] = (),
    images: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
) -> TransformerDecoder:
    """Build a model from the ``config.json`` of a Hugging Face checkpoint, without its weights.

    For a composite model (vision, audio, text), only the text decoder is built, unless it cannot be used alone. The
    checkpointer copies the other parts unchanged.

    Args:
        checkpoint_dir: folder with ``config.json``, or the file itself, or the URL of a folder (``s3://bucket/model``).
        ignore_fields: fields of the file to skip.
        images: also build the vision tower of a composite model.
        config_overrides: fields of the file to replace, for example ``{"max_position_embeddings": 131072}``. Exports
            write the new values. See :doc:`/long_context` for a longer context.

    Raises:
        ModelError: the file is missing or unreadable, the architecture is unknown, or a field has no equivalent in a
            description.

    Example:
        >>> with torch.device("meta"):
        ...     model = torchtune.models.from_hf_config(checkpoint)
        >>> model.spec.name
        'llama...'
    """
    path = local_path(checkpoint_dir, "model.checkpoint_dir")
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ModelError(f"There is no config.json in {checkpoint_dir}: give the folder of the checkpoint.")
    config = text_config(read_json(path, ModelError), images)
    if config_overrides:
        config = override_fields(config, config_overrides)
    architecture = architecture_of(config)
    if architecture is None:
        raise ModelError(f"{path} names no architecture (field 'architectures'): give the config.json of a checkpoint.")
    spec = spec_for_architecture(architecture)
    return build(spec.from_hf_config(config, ignore_fields), spec)


def stored_dtype(checkpoint_dir: str | Path | None) -> torch.dtype | None:
    """Return the dtype of a checkpoint's weights according to its ``config.json``.

    Args:
        checkpoint_dir: folder with ``config.json``.

    Returns:
        A floating-point dtype of 16 to 64 bits, or ``None`` if the file does not exist or names no such dtype.

    Raises:
        ModelError: the file is unreadable.

    Example:
        >>> torchtune.models.stored_dtype(checkpoint)
        torch.float32
    """
    if checkpoint_dir is None:
        return None
    path = local_path(checkpoint_dir, "checkpointer.checkpoint_dir") / "config.json"
    if not path.is_file():
        return None
    config = text_config(read_json(path, ModelError))
    name = config.get("dtype", config.get("torch_dtype"))
    return _STORED_DTYPES.get(name) if isinstance(name, str) else None
