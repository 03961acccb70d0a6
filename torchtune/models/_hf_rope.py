"""Read and write the RoPE settings of a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any

from torchtune.models._description import Description, ModelError
from torchtune.models._hf_fields import Fields, is_number, is_whole
from torchtune.models._rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

# rope_type -> (class, fields as (name in config.json, name in the class, type)).
_FACTOR = ("factor", "factor", float)
_ORIGINAL = ("original_max_position_embeddings", "original_max_seq_len", int)
_MAGNITUDE = ("attention_factor", "attention_factor", float)
_KINDS: dict[str, tuple[type[RopeScaling], tuple[tuple[str, str, type], ...]]] = {
    "linear": (LinearRopeScaling, (_FACTOR,)),
    "dynamic": (DynamicRopeScaling, (_FACTOR, _ORIGINAL)),
    "llama3": (
        Llama3RopeScaling,
        (_FACTOR, ("low_freq_factor",) * 2 + (float,), ("high_freq_factor",) * 2 + (float,), _ORIGINAL),
    ),
    "yarn": (
        YarnRopeScaling,
        (
            _FACTOR,
            _ORIGINAL,
            _MAGNITUDE,
            *((name, name, float) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
            ("truncate", "truncate", bool),
        ),
    ),
    "longrope": (
        LongRopeScaling,
        (
            _FACTOR,
            _ORIGINAL,
            _MAGNITUDE,
            ("short_factor", "short_factors", tuple),
            ("long_factor", "long_factors", tuple),
        ),
    ),
    "proportional": (ProportionalRopeScaling, (("partial_rotary_factor", "fraction", float), _FACTOR)),
}
_OPTIONAL = {
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}

_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")
_SAY_NOTHING = {"finetuned", "original_max_position_embeddings", "rope_theta", "partial_rotary_factor"}


def read_rope(fields: Fields, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Read RoPE settings from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Args:
        fields: fields of the file.
        allowed: variants that the architecture supports, as in :class:`HFFormat`.

    Returns:
        Values of a description.

    Raises:
        ModelError: the settings have no equivalent in a description.
    """
    found: dict[str, Any] = {}
    if "none" in allowed:
        # Some files have these fields, but they are unused.
        fields.skip("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        return found
    # Description raises for a size of 0.
    width = fields.take("head_dim", 0) or fields.take("hidden_size") // max(fields.take("num_attention_heads"), 1) or 1
    base = fields.take("rope_theta", 10_000.0)
    turning = fields.take("rotary_dim", width) if "dim" in allowed else width
    if fields.has("partial_rotary_factor"):
        turning = width  # even null has precedence, and means 1
    partial = fields.take("partial_rotary_factor", turning / width)
    local = fields.take("rope_local_base_freq", None)
    together, scaling = dict(fields.take("rope_parameters", None) or {}), fields.take("rope_scaling", None)
    name = "rope_scaling" if scaling or not together else "rope_parameters"
    if "kinds" in allowed:  # transformers reads only rope_parameters
        fields.require(rope_theta=None, rope_scaling=None, rope_local_base_freq=None)
    if {"window", "kinds"} & set(allowed):  # one set of parameters per kind of layer
        if together and not together.keys() & _KINDS_OF_LAYERS:  # transformers reads only these
            raise fields.refusal("rope_parameters", together)
        whole, windowed = (_object(fields, "rope_parameters", together.get(kind)) for kind in _KINDS_OF_LAYERS)
        local = windowed.get("rope_theta", local)
        for kind, found_rope in zip(_KINDS_OF_LAYERS, (whole, windowed), strict=True):
            if "kinds" in allowed and found_rope.get("rope_theta") is None:  # transformers requires it for both kinds
                raise fields.refusal(f"rope_parameters.{kind}.rope_theta", None)
        if windowed.get("rope_type", "default") != "default":
            raise fields.refusal("rope_parameters", together)
        together = {**whole, **(scaling or {})}
    elif together.keys() & set(_KINDS_OF_LAYERS):
        raise fields.refusal("rope_parameters", together)
    else:
        together = dict(scaling or together)
    if "sections" in allowed:  # only images need them: the three positions of a text token are equal
        together = {key: value for key, value in together.items() if not key.startswith("mrope_")}
    growth = _growth(fields, name, together) if "growth" in allowed else {}
    base = _number(fields, "rope_theta", together.pop("rope_theta", None), base)
    if together.get("rope_type") != "proportional":  # in this type, the factor is a parameter of the scaling
        share = together.pop("partial_rotary_factor", None)
        partial = partial if "kinds" in allowed else _number(fields, "partial_rotary_factor", share, partial)
    if partial != 1.0 and "partial" not in allowed:
        raise fields.refusal("partial_rotary_factor", partial)
    if local is not None and not {"window", "kinds"} & set(allowed):
        raise fields.refusal("rope_local_base_freq", local)
    if partial != 1.0:
        found["rope_dim"] = int(width * partial)
    if "alpha" in allowed and together.get("alpha") and "dynamic" in (together.get("rope_type"), together.get("type")):
        alpha = _number(fields, f"{name}.alpha", together["alpha"])
        base, together = base * alpha ** (width / (width - 2)), {}  # NTK-aware base for all sequence lengths
    if local is not None:
        found["rope_window_base"] = _number(fields, "rope_theta", local)
    return {"rope_base": base, "rope_scaling": _read_scaling(fields, name, together), **growth, **found}


def _growth(fields: Fields, name: str, together: dict[str, Any]) -> dict[str, Any]:
    """Read the scaling of queries by position, which ``transformers`` requires."""
    together.pop("max_position_embeddings", None)  # repeats the field of the config
    beta = together.pop("llama_4_scaling_beta", None)
    if not is_number(beta):
        raise fields.refusal(f"{name}.llama_4_scaling_beta", beta)
    span = fields.take(_ORIGINAL[0], None) or together.get(_ORIGINAL[0])
    if span is None and "yarn" in (together.get("rope_type"), together.get("type")):
        span = fields.take("max_position_embeddings")
    return {
        "query_growth": float(beta),
        "query_growth_span": _convert(fields, f"{name}.{_ORIGINAL[0]}", span, int),
    }


def _object(fields: Fields, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping | None):
        raise fields.refusal(name, value)
    return dict(value or {})


def _number(fields: Fields, name: str, value: Any, default: float = 0.0) -> float:
    """Check that the value, or the default, is a number above 0."""
    value = default if value is None else value
    if not is_number(value) or value <= 0:
        raise fields.refusal(name, value)
    return float(value)


def _convert(fields: Fields, name: str, value: Any, kind: type) -> Any:
    if kind is tuple and isinstance(value, list | tuple) and 0 < len(value) < 2**14 and all(map(is_number, value)):
        return tuple(map(float, value))
    if (kind is float and is_number(value)) or (kind is int and is_whole(value, 2**40) and value):
        return kind(value)
    if kind is bool and isinstance(value, bool):
        return value
    raise fields.refusal(name, value)


def _read_scaling(fields: Fields, name: str, scaling: dict[str, Any]) -> RopeScaling | None:
    old_spelling, new_spelling = scaling.pop("type", None), scaling.pop("rope_type", None)
    kind = new_spelling or old_spelling or "default"
    kind = "longrope" if kind == "su" or (kind == "yarn" and "short_factor" in scaling) else kind  # early Phi-3
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise fields.refusal(name, fields.peek(name))
    longest = fields.take("max_position_embeddings")
    original = fields.take(_ORIGINAL[0], None)
    if original is None:
        original = _convert(fields, f"{name}.{_ORIGINAL[0]}", scaling.get(_ORIGINAL[0], longest), int)
    if kind != "linear":
        scaling[_ORIGINAL[0]] = longest if kind == "dynamic" else original
    if kind == "proportional":
        scaling["factor"], _ = scaling.get("factor") or 1.0, scaling.pop(_ORIGINAL[0])
    if kind in ("yarn", "longrope") and scaling.get("factor") is None:
        scaling["factor"] = longest / original
    scaling_type, rows = _KINDS[kind]
    values = {}
    for theirs, ours, convert in rows:
        value = scaling.pop(theirs, None)
        if value is None and theirs not in _OPTIONAL:
            raise ModelError(f"config.json: {name} of type {kind} lacks the field '{theirs}'.")
        if value is not None:
            values[ours] = _convert(fields, f"{name}.{theirs}", value, convert)
    unread = {key for key, value in scaling.items() if value is not None} - _SAY_NOTHING
    if unread:
        raise fields.refusal(f"{name}.{min(unread)}", scaling[min(unread)])
    return scaling_type(**values)


def write_growth(d: Description) -> dict[str, Any]:
    """Make ``rope_scaling`` of a ``config.json``, including the scaling of queries by position."""
    growth = {"original_max_position_embeddings": d.query_growth_span, "llama_4_scaling_beta": d.query_growth}
    return {"rope_scaling": {**(write_scaling(d.rope_scaling) or {"rope_type": "default"}), **growth}}


def write_kinds(base: float, scaling: RopeScaling | None, window_base: float | None) -> dict[str, Any]:
    """Make ``rope_parameters`` of a ``config.json``, with one set per kind of layer."""
    found = {"full_attention": {"rope_theta": base, **(write_scaling(scaling) or {"rope_type": "default"})}}
    if window_base is not None:
        found["sliding_attention"] = {"rope_theta": window_base, "rope_type": "default"}
    return found


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Make ``rope_scaling`` of a ``config.json``; None without scaling."""
    for kind, (scaling_type, rows) in _KINDS.items():
        if isinstance(scaling, scaling_type):
            values = {theirs: getattr(scaling, ours) for theirs, ours, _ in rows}
            found = {"rope_type": kind, **{key: value for key, value in values.items() if value is not None}}
            return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    return None
