"""Reading and writing the rotary positions of a Hugging Face ``config.json``."""

from typing import Any

from torchtune.models._description import ModelError
from torchtune.models._hf_fields import Fields
from torchtune.models._rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

# rope_type -> class, and its fields: theirs, ours, type.
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
}
_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}

_SAY_NOTHING = {"finetuned", "original_max_position_embeddings", "rope_theta", "partial_rotary_factor"}


def read_rope(fields: Fields, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Positions, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Args:
        fields: of the file.
        allowed: what the architecture may have: ``"partial"``, ``"window"``.

    Returns:
        Values of a description.

    Raises:
        ModelError: something that a description cannot express.
    """
    found: dict[str, Any] = {}
    together = dict(fields.take("rope_parameters", None) or {})
    base, partial = fields.take("rope_theta", 10_000.0), fields.take("partial_rotary_factor", 1.0)
    local = fields.take("rope_local_base_freq", None)
    name, scaling = "rope_scaling", fields.take("rope_scaling", None)
    if "full_attention" in together:  # one set of parameters for each kind of layer
        local_parameters, together = together.get("sliding_attention") or {}, dict(together["full_attention"])
        local = local_parameters.get("rope_theta", local)
        if local_parameters.get("rope_type", "default") != "default":
            raise fields.refusal("rope_parameters", fields.peek("rope_parameters"))
    if together:
        base = together.pop("rope_theta", base)
        partial = together.pop("partial_rotary_factor", partial)
        name, scaling = "rope_parameters", together
    if float(partial) != 1.0 and "partial" not in allowed:
        raise fields.refusal("partial_rotary_factor", partial)
    if local is not None and "window" not in allowed:
        raise fields.refusal("rope_local_base_freq", local)
    if float(partial) != 1.0:
        width = fields.take("head_dim", 0) or fields.take("hidden_size") // fields.take("num_attention_heads")
        found["rope_dim"] = int(width * partial)
    if local is not None:
        found["rope_window_base"] = float(local)
    return {"rope_base": float(base), "rope_scaling": _read_scaling(fields, name, dict(scaling or {})), **found}


def _read_scaling(fields: Fields, name: str, scaling: dict[str, Any]) -> RopeScaling | None:
    old_spelling, new_spelling = scaling.pop("type", None), scaling.pop("rope_type", None)
    kind = new_spelling or old_spelling or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    if kind == "default":
        return None
    if kind not in _KINDS:
        raise fields.refusal(name, fields.peek(name))
    longest = fields.take("max_position_embeddings")
    original = fields.take("original_max_position_embeddings", scaling.get(_ORIGINAL[0], longest))
    if kind in ("yarn", "longrope", "dynamic"):
        scaling[_ORIGINAL[0]] = longest if kind == "dynamic" else original
    if kind in ("yarn", "longrope") and scaling.get("factor") is None:
        scaling["factor"] = longest / original
    scaling_type, rows = _KINDS[kind]
    values = {}
    for theirs, ours, convert in rows:
        value = scaling.pop(theirs, None)
        if value is None and theirs not in _OPTIONAL:
            raise ModelError(f"config.json: {name} of type {kind} lacks the field '{theirs}'.")
        if value is not None:
            values[ours] = convert(value)
    unread = {key for key, value in scaling.items() if value is not None} - _SAY_NOTHING
    if unread:
        raise fields.refusal(f"{name}.{min(unread)}", scaling[min(unread)])
    return scaling_type(**values)


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The inverse: ``rope_scaling`` of a ``config.json``."""
    for kind, (scaling_type, rows) in _KINDS.items():
        if isinstance(scaling, scaling_type):
            values = {theirs: getattr(scaling, ours) for theirs, ours, _ in rows}
            found = {"rope_type": kind, **{key: value for key, value in values.items() if value is not None}}
            return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    return None
