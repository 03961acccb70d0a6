"""Read and write the RoPE settings of a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any

from torchtune.models._description import (
    Description,
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ModelError,
    ProportionalRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)
from torchtune.models._hf_fields import Fields, is_number, is_whole

# Pre-training context length, beside the parameters of a scaling or at the top level of a file.
_ORIGINAL_FIELD = "original_max_position_embeddings"
_MAX_FACTORS = 2**14  # numbers in a list of LongRoPE; more than the pairs of channels of any head
# Parameters of several types of scaling: (name in config.json, name in the class, type).
_FACTOR = ("factor", "factor", float)
_ORIGINAL = (_ORIGINAL_FIELD, "original_max_seq_len", int)
_MAGNITUDE = ("attention_factor", "attention_factor", float)
# rope_type -> (class, parameters as above).
_SCALINGS: dict[str, tuple[type[RopeScaling], tuple[tuple[str, str, type], ...]]] = {
    "linear": (LinearRopeScaling, (_FACTOR,)),
    "dynamic": (DynamicRopeScaling, (_FACTOR, _ORIGINAL)),
    "llama3": (
        Llama3RopeScaling,
        (
            _FACTOR,
            ("low_freq_factor", "low_freq_factor", float),
            ("high_freq_factor", "high_freq_factor", float),
            _ORIGINAL,
        ),
    ),
    "yarn": (
        YarnRopeScaling,
        (
            _FACTOR,
            _ORIGINAL,
            _MAGNITUDE,
            ("beta_fast", "beta_fast", float),
            ("beta_slow", "beta_slow", float),
            ("mscale", "mscale", float),
            ("mscale_all_dim", "mscale_all_dim", float),
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
# Parameters with a default in their class.
_OPTIONAL = {
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}
# Keys beside the parameters of a scaling that do not change it.
_NO_EFFECT = {"finetuned", "original_max_position_embeddings", "rope_theta", "partial_rotary_factor"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


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
    if "none" in allowed:
        # Some files have these fields, but they are unused.
        fields.skip("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        return {}
    has_window_base = "window" in allowed or "by_layer_type" in allowed
    head_dim = fields.take("head_dim", 0)
    if not head_dim:
        head_dim = fields.take("hidden_size") // max(fields.take("num_attention_heads"), 1)
    head_dim = head_dim or 1  # Description raises for 0, with the name of the field

    # Before transformers 5, the base and the rotated fraction are fields of their own.
    base = fields.take("rope_theta", 10_000.0)
    rotary_dim = head_dim
    if "dim" in allowed:
        rotary_dim = fields.take("rotary_dim", head_dim)
    if fields.has("partial_rotary_factor"):
        rotary_dim = head_dim  # even null has precedence, and means 1
    fraction = fields.take("partial_rotary_factor", rotary_dim / head_dim)
    window_base = fields.take("rope_local_base_freq", None)
    parameters = dict(fields.take("rope_parameters", None) or {})
    scaling = fields.take("rope_scaling", None)
    field_name = "rope_scaling" if scaling or not parameters else "rope_parameters"
    if "by_layer_type" in allowed:  # transformers reads only rope_parameters
        fields.require(rope_theta=None, rope_scaling=None, rope_local_base_freq=None)
    if has_window_base:
        full, windowed = _parameters_by_layer_type(fields, parameters, must_have_base="by_layer_type" in allowed)
        window_base = windowed.get("rope_theta", window_base)
        rope = {**full, **(scaling or {})}  # rope_scaling is for the layers with full attention alone
    elif parameters.keys() & set(_LAYER_TYPES):
        raise fields.refusal("rope_parameters", parameters)
    else:
        rope = dict(scaling or parameters)
    if "sections" in allowed:  # only images need them: the three positions of a text token are equal
        rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}

    # From here on, values that are read are removed from ``rope``, until only the parameters of the scaling remain.
    values: dict[str, Any] = {}
    if "growth" in allowed:
        values |= _read_growth(fields, field_name, rope)
    base = _positive(fields, "rope_theta", rope.pop("rope_theta", None), base)
    if rope.get("rope_type") != "proportional":  # in this type, the fraction is a parameter of the scaling
        rope_fraction = rope.pop("partial_rotary_factor", None)
        if "by_layer_type" not in allowed:
            fraction = _positive(fields, "partial_rotary_factor", rope_fraction, fraction)
    if fraction != 1.0:
        if "partial" not in allowed:
            raise fields.refusal("partial_rotary_factor", fraction)
        values["rope_dim"] = int(head_dim * fraction)
    if window_base is not None:
        if not has_window_base:
            raise fields.refusal("rope_local_base_freq", window_base)
        values["rope_window_base"] = _positive(fields, "rope_theta", window_base)
    is_dynamic = "dynamic" in (rope.get("rope_type"), rope.get("type"))
    if "alpha" in allowed and rope.get("alpha") and is_dynamic:
        # NTK-aware scaling with a constant alpha: another base for all sequence lengths. The exponent stretches the
        # longest wavelength by alpha, and leaves the shortest one as it is.
        alpha = _positive(fields, f"{field_name}.alpha", rope["alpha"])
        base = base * alpha ** (head_dim / (head_dim - 2))
        rope = {}
    values["rope_base"] = base
    values["rope_scaling"] = _read_scaling(fields, field_name, rope)
    return values


def _parameters_by_layer_type(
    fields: Fields, parameters: Mapping[str, Any], *, must_have_base: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read ``rope_parameters`` with one object per type of layer: full attention, and sliding windows."""
    if parameters and not parameters.keys() & set(_LAYER_TYPES):  # transformers reads only these
        raise fields.refusal("rope_parameters", parameters)
    by_type = {}
    for layer_type in _LAYER_TYPES:
        rope = parameters.get(layer_type)
        if not isinstance(rope, Mapping | None):
            raise fields.refusal("rope_parameters", rope)
        by_type[layer_type] = dict(rope or {})
    for layer_type, rope in by_type.items():
        if must_have_base and rope.get("rope_theta") is None:  # transformers requires it for both types
            raise fields.refusal(f"rope_parameters.{layer_type}.rope_theta", None)
    full = by_type["full_attention"]
    windowed = by_type["sliding_attention"]
    # A description has a base for these layers, but no scaling.
    if windowed.get("rope_type", "default") != "default":
        raise fields.refusal("rope_parameters", parameters)
    return full, windowed


def _read_growth(fields: Fields, field_name: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Read the scaling of queries by position, which ``transformers`` requires, and remove it from ``rope``."""
    rope.pop("max_position_embeddings", None)  # repeats the field of the config
    beta = rope.pop("llama_4_scaling_beta", None)
    if not is_number(beta):
        raise fields.refusal(f"{field_name}.llama_4_scaling_beta", beta)
    span = fields.take(_ORIGINAL_FIELD, None) or rope.get(_ORIGINAL_FIELD)
    if span is None and "yarn" in (rope.get("rope_type"), rope.get("type")):
        span = fields.take("max_position_embeddings")
    return {
        "query_growth": float(beta),
        "query_growth_span": _convert(fields, f"{field_name}.{_ORIGINAL_FIELD}", span, int),
    }


def _positive(fields: Fields, name: str, value: Any, default: float = 0.0) -> float:
    """Return the value, or the default if it is None, as a number above 0."""
    if value is None:
        value = default
    if not is_number(value) or value <= 0:
        raise fields.refusal(name, value)
    return float(value)


def _convert(fields: Fields, name: str, value: Any, value_type: type) -> Any:
    """Convert a value of a scaling to its type: a whole number above 0, a number, a bool or a tuple of numbers."""
    if value_type is int and is_whole(value, 2**40) and value:
        return int(value)
    if value_type is float and is_number(value):
        return float(value)
    if value_type is bool and isinstance(value, bool):
        return value
    if value_type is tuple and isinstance(value, list | tuple) and 0 < len(value) < _MAX_FACTORS:
        numbers = [number for number in value if is_number(number)]
        if len(numbers) == len(value):
            return tuple(float(number) for number in numbers)
    raise fields.refusal(name, value)


def _read_scaling(fields: Fields, field_name: str, scaling: dict[str, Any]) -> RopeScaling | None:
    """Read the parameters of ``rope_scaling`` or ``rope_parameters`` beside the base; None without scaling."""
    # Both names of the type are removed, and below each parameter that is read: what remains has no equivalent.
    older_type = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", None) or older_type or "default"
    if rope_type == "su" or (rope_type == "yarn" and "short_factor" in scaling):  # in early files of Phi-3
        rope_type = "longrope"
    if rope_type == "default":
        return None
    if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
        raise fields.refusal(field_name, fields.peek(field_name))
    _complete_scaling(fields, field_name, rope_type, scaling)
    scaling_class, table = _SCALINGS[rope_type]
    values = {}
    for key, attribute, value_type in table:
        value = scaling.pop(key, None)
        if value is not None:
            values[attribute] = _convert(fields, f"{field_name}.{key}", value, value_type)
        elif key not in _OPTIONAL:
            raise ModelError(f"config.json: {field_name} of type {rope_type} lacks the field '{key}'.")
    unread = {key for key, value in scaling.items() if value is not None} - _NO_EFFECT
    if unread:
        key = min(unread)
        raise fields.refusal(f"{field_name}.{key}", scaling[key])
    return scaling_class(**values)


def _complete_scaling(fields: Fields, field_name: str, rope_type: str, scaling: dict[str, Any]) -> None:
    """Add the parameters of a scaling that ``transformers`` takes from the config or computes."""
    max_seq_len = fields.take("max_position_embeddings")
    original = fields.take(_ORIGINAL_FIELD, None)
    if original is None:
        value = scaling.get(_ORIGINAL_FIELD, max_seq_len)
        original = _convert(fields, f"{field_name}.{_ORIGINAL_FIELD}", value, int)
    if rope_type == "proportional":
        scaling.pop(_ORIGINAL_FIELD, None)
        scaling["factor"] = scaling.get("factor") or 1.0
    elif rope_type == "dynamic":
        # The base grows with sequences beyond max_position_embeddings, whatever the other field says.
        scaling[_ORIGINAL_FIELD] = max_seq_len
    elif rope_type != "linear":
        scaling[_ORIGINAL_FIELD] = original
    if rope_type in ("yarn", "longrope") and scaling.get("factor") is None:
        scaling["factor"] = max_seq_len / original


def write_growth(d: Description) -> dict[str, Any]:
    """Make ``rope_scaling`` of a ``config.json``, with the scaling of queries by position."""
    scaling = write_scaling(d.rope_scaling) or {"rope_type": "default"}
    scaling[_ORIGINAL_FIELD] = d.query_growth_span
    scaling["llama_4_scaling_beta"] = d.query_growth
    return {"rope_scaling": scaling}


def write_rope_by_layer_type(base: float, scaling: RopeScaling | None, window_base: float | None) -> dict[str, Any]:
    """Make ``rope_parameters`` of a ``config.json``, with one object per type of layer."""
    full = {"rope_theta": base, **(write_scaling(scaling) or {"rope_type": "default"})}
    if window_base is None:
        return {"full_attention": full}
    return {"full_attention": full, "sliding_attention": {"rope_theta": window_base, "rope_type": "default"}}


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Make ``rope_scaling`` of a ``config.json``; None without scaling."""
    for rope_type, (scaling_class, table) in _SCALINGS.items():
        if isinstance(scaling, scaling_class):
            config: dict[str, Any] = {"rope_type": rope_type}
            for key, attribute, _ in table:
                value = getattr(scaling, attribute)
                if value is not None:
                    config[key] = list(value) if isinstance(value, tuple) else value
            return config
    return None
