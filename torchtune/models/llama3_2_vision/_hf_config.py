"""Read and write the ``config.json`` of Llama 3.2 Vision."""

from collections.abc import Collection, Mapping
from typing import Any

from torchtune.models._description import Description, ModelError
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, is_whole
from torchtune.models.llama3_2_vision._description import VisionDescription

_NAME = "MllamaForConditionalGeneration"
_TEXT = HFFormat(
    _NAME,
    "mllama_text_model",
    "interleaved",
    defaults=(
        ("num_key_value_heads", 8),
        ("max_position_embeddings", 131_072),
        ("rms_norm_eps", 1e-5),
        ("vocab_size", 128_256),
        ("hidden_size", 4096),
        ("intermediate_size", 14_336),
        ("num_attention_heads", 32),
    ),
)
_CROSS_LAYERS, _LAYERS = [3, 8, 13, 18, 23, 28, 33, 38], 40  # defaults of transformers
_INDICES = [3, 7, 15, 23, 30]
_SIZES = (  # of vision_config: their name, our name, default of transformers
    ("image_size", "tile_size", 448),
    ("patch_size", "patch_size", 14),
    ("hidden_size", "clip_dim", 1280),
    ("num_hidden_layers", "num_clip_layers", 32),
    ("attention_heads", "num_clip_heads", 16),
    ("num_global_layers", "num_projection_layers", 8),
    ("max_num_tiles", "max_num_tiles", 4),
    ("num_channels", "in_channels", 3),
)


def read(config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> VisionDescription:
    """Make a description from the contents of a ``config.json``; see :meth:`HFFormat.read`.

    Raises:
        ModelError: a field is missing, or its value has no equivalent in a description. The message names it.
    """
    parts = {}
    for name in ("text_config", "vision_config"):
        if not isinstance(config.get(name), Mapping):
            raise ModelError(f"config.json of {_NAME} lacks the object '{name}': download it again.")
        parts[name] = dict(config[name])
    whole = Fields(config, _NAME, {*ignore_fields, *parts, "image_token_index", "tie_word_embeddings"})
    whole.refuse_unread()
    text, fusion_layers = _read_text(parts["text_config"], ignore_fields)
    vision = _read_vision(parts["vision_config"], ignore_fields)
    return VisionDescription(**vars(text), fusion_layers=fusion_layers, **vision)


def _read_text(config: dict[str, Any], ignore_fields: Collection[str]) -> tuple[Description, tuple[int, ...]]:
    """Read the text decoder, and the indices of its layers with cross-attention before them."""
    fields = Fields(config, _NAME, set(ignore_fields))
    crossing = fields.list_of("cross_attention_layers", _LAYERS, int, _CROSS_LAYERS)
    layers = config.pop("num_hidden_layers", _LAYERS)
    ours = tuple(layer - before for before, layer in enumerate(crossing))
    if (
        not is_whole(layers, 2**16)
        or not ours
        or list(ours) != sorted(set(ours))
        or not 0 <= ours[0] <= ours[-1] < layers - len(ours)
    ):
        raise ModelError(
            f"config.json of {_NAME} has cross_attention_layers = {crossing} of {layers} layers, but a self-attention "
            "layer must come after each of them."
        )
    if config.pop("dropout", None) and config.get("attention_dropout"):
        raise fields.refusal("attention_dropout", config["attention_dropout"])
    if fields.peek("dropout"):
        config["attention_dropout"] = fields.peek("dropout")
    if "rope_parameters" not in config:
        config.setdefault("rope_theta", 500_000.0)
    config = {key: value for key, value in config.items() if key not in ("cross_attention_layers", "dropout")}
    text = _TEXT.read({**config, "num_hidden_layers": layers - len(ours)}, ignore_fields)
    if text.tie_word_embeddings or text.head_dim * text.num_heads != text.embed_dim:
        name = "tie_word_embeddings" if text.tie_word_embeddings else "head_dim"
        raise fields.refusal(name, fields.peek(name))
    return text, ours


def _read_vision(config: dict[str, Any], ignore_fields: Collection[str]) -> dict[str, Any]:
    # Configs of 2024 have tie_word_embeddings here, although the image encoder has no tokens.
    fields = Fields(config, f"{_NAME} (vision_config)", {*ignore_fields, "tie_word_embeddings"})
    indices = tuple(fields.list_of("intermediate_layers_indices", _LAYERS, int, _INDICES))
    values = {
        **{ours: fields.typed(theirs, default) for theirs, ours, default in _SIZES},
        "clip_hidden_states": indices,
        "clip_norm_eps": float(fields.take("norm_eps", 1e-5)),
    }
    width = values["clip_dim"]
    fields.typed("num_attention_heads", values["num_clip_heads"])
    wanted = {
        "hidden_act": ("gelu", "gelu"),
        "intermediate_size": (4 * width, 5120),
        "vision_output_dim": (width * (1 + len(indices)), 7680),
        "supported_aspect_ratios": ([list(ratio) for ratio in _ratios(values["max_num_tiles"])], None),
    }
    for name, (value, default) in wanted.items():
        if fields.take(name, default) not in (value, None):
            raise fields.refusal(name, fields.peek(name))
    fields.refuse_unread()
    return values


def _ratios(most: int) -> list[tuple[int, int]]:
    numbers = range(1, most + 1)
    return [(height, width) for height in numbers for width in numbers if height * width <= most]


def write(d: VisionDescription) -> dict[str, Any]:
    """Make the ``config.json`` from which ``transformers`` builds the same model.

    Raises:
        ModelError: a ``config.json`` cannot express the description.
    """
    text = _TEXT.write(d.text)
    text = {key: value for key, value in text.items() if key not in ("architectures", "head_dim", "attention_dropout")}
    text |= {
        "num_hidden_layers": d.num_layers + len(d.fusion_layers),
        "cross_attention_layers": [d.other_numbers(layer)["cross"] for layer in d.fusion_layers],
        "dropout": d.attn_dropout,
    }
    vision = {
        "model_type": "mllama_vision_model",
        "hidden_act": "gelu",
        **{theirs: getattr(d, ours) for theirs, ours, _ in _SIZES},
        "intermediate_size": 4 * d.clip_dim,
        "vision_output_dim": d.clip_dim * (1 + len(d.clip_hidden_states)),
        "norm_eps": d.clip_norm_eps,
        "intermediate_layers_indices": list(d.clip_hidden_states),
        "supported_aspect_ratios": [list(ratio) for ratio in d.aspect_ratios],
    }
    config = {
        "architectures": [_NAME],
        "model_type": "mllama",
        "image_token_index": d.vocab_size,
        "text_config": text,
        "vision_config": vision,
    }
    if (again := read(config)) != d:
        raise ModelError(f"A config.json of {_NAME} cannot express {d}, only {again}.")
    return config
