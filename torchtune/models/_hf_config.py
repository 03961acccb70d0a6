"""Read and write the ``config.json`` of Hugging Face decoders of Llama's architecture."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtune.models._description import Description, LongRopeScaling, ModelError
from torchtune.models._hf_fields import (
    HF_ACTIVATION_NAMES,
    HF_ACTIVATIONS,
    Fields,
    all_but_every,
    architecture_of,
    layers_of_type,
    no_values,
    write_layer_types,
)
from torchtune.models._hf_rope import read_rope, write_rope_by_layer_type, write_scaling
from torchtune.utils import read_json

# Fields in which null means absent, so that HFFormat.defaults apply.
_NEVER_NULL = ("rope_theta", "rope_local_base_freq", "rope_parameters", "hidden_size_per_layer_input")
_CLASSIFIER = "ForSequenceClassification"
# Default of max_window_layers in transformers.
_MAX_WINDOW_LAYERS = 28
# Field of Description -> field of config.json, for error messages.
_HF_NAMES = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "router_groups": "n_group",
    "router_top_groups": "topk_group",
    "expert_latent_dim": "moe_latent_size",
    "attn_dropout": "attention_dropout",
    "window": "sliding_window",
    "full_head_dim": "global_head_dim",
    "full_num_kv_heads": "num_global_key_value_heads",
    "shared_kv_layers": "num_kv_shared_layers",
    "layer_embed_dim": "hidden_size_per_layer_input",
    "layer_embed_vocab": "vocab_size_per_layer_input",
}


@dataclass(frozen=True)
class HFFormat:
    """Mapping between a :class:`Description` and the ``config.json`` of a Hugging Face architecture.

    Attributes:
        architecture: entry of ``architectures``.
        model_type: value of ``model_type``.
        rope_layout: order of the rows of queries and keys in *this library*, as in a description.
            ``docs/adding_a_model.rst`` lists the matching rows of ``hf_names``.
        biases: attention projections with a bias: none; always queries, keys and values; or, if the flag in
            ``bias_fields`` is set, queries, keys, values, and with ``output_bias`` the output projection.
        output_bias: whether the flag of ``biases="attention_bias"`` includes the output projection.
        has_mlp_bias: whether there is a flag for biases of the feed-forward.
        bias_fields: names of the flags of attention and of the feed-forward; they may be the same.
        qk_norm: see :class:`Description`.
        mixer_layer_type: entry of ``layer_types`` for layers with a mixer or chunked attention, which ``read_more``
            reads.
        windows: condition for sliding windows: ``"sliding_window"`` is set, ``"use_sliding_window"`` must also be true,
            or the architecture has no sliding windows (``"none"``).
        window_layers: layers with a sliding window if ``layer_types`` is absent: ``"all"``, all but every n-th (an
            int), layers from ``max_window_layers`` on (``"late"``), or layers without RoPE (``"unrotated"``).
        rotates_windows_only: whether, in a model with sliding windows, only the sliding-window layers have RoPE.
        ropes: supported variants of RoPE: ``"partial"`` (only the first channels of a head are rotated), ``"dim"``
            (the field ``rotary_dim`` sets their number), ``"window"`` (a separate base in sliding-window layers),
            ``"by_layer_type"`` (the same, in ``rope_parameters`` only), ``"sections"`` (channels are split among time,
            row and column, for images), ``"alpha"`` (a scaled base), ``"growth"`` (queries are scaled by position).
            ``"none"``: the architecture has no RoPE.
        activation: name of the activation field, and its default.
        eps_field: name of the field with the eps of the norms.
        fixed: values of a description that are not in the file.
        required_values: fields of the file with a single supported value.
        unused: fields of the file that do not affect the model.
        extra_fields: further fields: (name in the file, name in a description, default, which also defines the type).
        read_more: reads fields that the other attributes cannot express: ``read_more(fields) -> values of a
            description``. It calls ``fields.take(name, default)``; a field that is never read raises an error.
        write_more: inverse of ``read_more``: ``write_more(description) -> fields``.
        prepare: rewrites the fields of a file before they are read.
        defaults: values of missing fields: the defaults of the configuration class in ``transformers`` that differ from
            the defaults in :meth:`read`.
    """

    architecture: str
    model_type: str
    rope_layout: Literal["interleaved", "half"]
    biases: Literal["none", "qkv", "attention_bias"] = "none"
    output_bias: bool = True
    has_mlp_bias: bool = False
    bias_fields: tuple[str, str] = ("attention_bias", "mlp_bias")
    qk_norm: Literal["none", "before_rope", "after_rope"] = "none"
    mixer_layer_type: str | None = None
    windows: Literal["none", "sliding_window", "use_sliding_window"] = "none"
    window_layers: int | Literal["all", "late", "unrotated"] = "all"
    rotates_windows_only: bool = False
    ropes: tuple[Literal["partial", "dim", "window", "by_layer_type", "sections", "alpha", "growth", "none"], ...] = ()
    activation: tuple[str, str] = ("hidden_act", "silu")
    eps_field: str = "rms_norm_eps"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    required_values: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    extra_fields: tuple[tuple[str, str, Any], ...] = ()
    read_more: Callable[[Fields], dict[str, Any]] = no_values
    write_more: Callable[[Description], dict[str, Any]] = no_values
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def describe(self, **values: Any) -> Description:
        """Make a description from the values that differ between models of the architecture."""
        has_qkv_bias = self.biases == "qkv"
        constants = {
            "rope_layout": self.rope_layout,
            "qk_norm": self.qk_norm,
            "activation": HF_ACTIVATIONS[self.activation[1]],
            "q_bias": has_qkv_bias,
            "k_bias": has_qkv_bias,
            "v_bias": has_qkv_bias,
            **self.fixed,
        }
        return Description(**{**constants, **values})

    def read(self, config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> Description:
        """Make a description from the contents of a ``config.json``.

        Args:
            config: the file's contents.
            ignore_fields: names of fields to skip.

        Raises:
            ModelError: a field is missing, or its value has no equivalent in a description. The message names the
                field.
        """
        try:
            return self._read(config, ignore_fields)
        except ZeroDivisionError as error:
            divisor = self._zero_divisor(config, ignore_fields) or "a size or a factor"
            raise ModelError(f"config.json of {self.architecture}: {divisor} is 0, which no such model has.") from error

    def _zero_divisor(self, config: Mapping[str, Any], ignore_fields: Collection[str]) -> str | None:
        """Return the name of the field that must not be 0: with another value, nothing is divided by zero."""
        for name, value in config.items():
            is_zero = type(value) in (int, float) and value == 0
            if not is_zero:
                continue
            # A size of 1 may be rounded down to 0 by another division, so that a large one is tried, too.
            for other_value in (1, 4096):
                try:
                    self._read({**config, name: other_value}, ignore_fields)
                except ZeroDivisionError:
                    continue
                except ModelError:  # another field is also invalid
                    pass
                return name
        return None

    def _read(self, config: Mapping[str, Any], ignore_fields: Collection[str]) -> Description:
        """See :meth:`read`, which names the field if this method divides by 0."""
        complete_config = dict(self.defaults)
        for name, value in self.prepare(config).items():
            # null means "absent" in these fields, and "none" in others, such as sliding_window.
            if value is not None or name not in _NEVER_NULL:
                complete_config[name] = value
        fields = Fields(complete_config, self.architecture, set(ignore_fields))
        values = self._read_layers(fields) | read_rope(fields, self.ropes) | _read_classes(config, fields)
        for name, attribute, default in self.extra_fields:
            values[attribute] = type(default)(fields.take(name, default))  # files may have 1 for 1.0 or for true
        family_values = self.read_more(fields)
        fields.skip(*self.unused)
        fields.require(**self.required_values)
        num_layers = values["num_layers"]
        values |= self._read_windows(fields, num_layers, family_values.get("unrotated_layers", ()))
        # Last, because a family may correct what is common to all.
        values |= family_values
        if self.rotates_windows_only and fields.take("sliding_window", None) is not None:
            # As in transformers, the size of the windows decides: without it, all layers have RoPE; with it, only the
            # layers with a window, even if there are none.
            window_layers = values.get("window_layers", ())
            values["unrotated_layers"] = tuple(layer for layer in range(num_layers) if layer not in window_layers)
        try:
            description = self.describe(**values)
        except ModelError as error:
            # The message names fields of a description, but the reader has a config.json.
            hf_names = dict(_HF_NAMES)
            if "num_local_experts" in config:
                hf_names["num_experts"] = "num_local_experts"
            message = re.sub(r"\w+", lambda match: hf_names.get(match[0], match[0]), str(error))
            raise ModelError(f"config.json of {self.architecture}: {message}") from error
        # After all reads: a field that none of them asked for could change the model.
        fields.refuse_unread()
        return description

    def _read_layers(self, fields: Fields) -> dict[str, Any]:
        """Read the sizes, biases and norms that all architectures have."""
        attention_flag, mlp_flag = self.bias_fields
        has_attention_bias = self.biases == "attention_bias" and bool(fields.take(attention_flag, False))
        has_qkv_bias = has_attention_bias or self.biases == "qkv"
        num_heads = fields.take("num_attention_heads")
        num_layers = fields.take("num_hidden_layers")
        if num_layers < 1:  # checked before families look for a layer
            raise ModelError(f"config.json of {self.architecture}: num_hidden_layers must be at least 1, got 0.")
        return {
            "vocab_size": fields.take("vocab_size"),
            "num_layers": num_layers,
            "embed_dim": fields.take("hidden_size"),
            "intermediate_dim": fields.take("intermediate_size"),
            "max_seq_len": fields.take("max_position_embeddings"),
            "num_heads": num_heads,
            "num_kv_heads": fields.take("num_key_value_heads", num_heads),
            "head_dim": fields.take("head_dim", 0),  # 0: hidden_size // num_attention_heads
            "attn_dropout": float(fields.take("attention_dropout", 0.0)),
            "is_causal": bool(fields.take("is_causal", True)),
            "q_bias": has_qkv_bias,
            "k_bias": has_qkv_bias,
            "v_bias": has_qkv_bias,
            "attn_output_bias": has_attention_bias and self.output_bias,
            "activation": fields.choice(self.activation[0], HF_ACTIVATIONS, self.activation[1]),
            "mlp_bias": self.has_mlp_bias and bool(fields.take(mlp_flag, False)),
            "norm_eps": float(fields.take(self.eps_field, 1e-6)),
            "tie_word_embeddings": bool(fields.take("tie_word_embeddings", False)),
        }

    def write(self, description: Description) -> dict[str, Any]:
        """Make the ``config.json`` from which ``transformers`` builds the same model.

        Raises:
            ModelError: the architecture cannot express the description. The message names the field.
        """
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": description.vocab_size,
            "hidden_size": description.embed_dim,
            "intermediate_size": description.intermediate_dim,
            "num_hidden_layers": description.num_layers,
            "num_attention_heads": description.num_heads,
            "num_key_value_heads": description.num_kv_heads,
            "head_dim": description.head_dim,
            self.activation[0]: HF_ACTIVATION_NAMES[description.activation],
            "max_position_embeddings": description.max_seq_len,
            self.eps_field: description.norm_eps,
            "attention_dropout": description.attn_dropout,
            "tie_word_embeddings": description.tie_word_embeddings,
            **self._write_rope(description),
            **self._write_windows(description),
        }
        for name, attribute, _ in self.extra_fields:
            config[name] = getattr(description, attribute)
        if not description.is_causal:
            config["is_causal"] = False
        if isinstance(description.rope_scaling, LongRopeScaling):  # some architectures read it only here
            config["original_max_position_embeddings"] = description.rope_scaling.original_max_seq_len
        if description.is_classifier:
            config["architectures"] = [self.architecture.replace("ForCausalLM", _CLASSIFIER)]
            class_names = description.class_names or _default_names(description.num_classes)
            config["id2label"] = dict(enumerate(class_names))
            config["label2id"] = {name: index for index, name in enumerate(class_names)}
            if description.problem_type is not None:
                config["problem_type"] = description.problem_type
        attention_flag, mlp_flag = self.bias_fields
        if self.biases == "attention_bias":
            config[attention_flag] = description.q_bias
            # If the flag includes the output projection, both values must be equal: otherwise, the check below raises.
            if self.output_bias:
                config[attention_flag] = description.attn_output_bias
        if self.has_mlp_bias:
            config[mlp_flag] = description.mlp_bias
        config |= self.write_more(description)
        # Whoever reads this file must get the same model.
        reread = self.read(config)
        for attribute, value in vars(description.text).items():
            reread_value = getattr(reread, attribute)
            if reread_value != value:
                raise ModelError(
                    f"The architecture {self.architecture} cannot express {attribute} = {value!r} in a config.json "
                    f"(only {reread_value!r})."
                )
        return config

    def _read_windows(self, fields: Fields, num_layers: int, unrotated: Collection[int]) -> dict[str, Any]:
        """Read the size of the sliding windows and the layers with one; empty without windows.

        Args:
            fields: fields of the file.
            num_layers: number of layers of the model.
            unrotated: layers without RoPE.
        """
        # All fields are read first, whether they count or not: a field that nobody reads raises an error.
        window = fields.take("sliding_window", None) or None  # 0, too, means no windows
        use_windows = fields.take("use_sliding_window", False)
        layer_types = self._read_layer_types(fields, num_layers)
        layers = self._window_layers(fields, num_layers, layer_types, unrotated)
        if self.windows == "none":  # a file that asks for windows all the same is refused
            if use_windows and window is not None:
                raise fields.refusal("sliding_window", window)
            if layer_types is not None and layers:
                raise fields.refusal("layer_types", layer_types)
            return {}
        if self.windows == "use_sliding_window" and not use_windows:
            if layer_types is not None and layers and window is not None:
                raise ModelError(
                    f"config.json of {self.architecture} has sliding windows in layer_types, but "
                    "use_sliding_window is not true: set it to true, or make all of layer_types 'full_attention'."
                )
            return {}
        if window is None:
            return {}
        if self.window_layers == "all" and layer_types is not None and len(layers) < num_layers:
            raise fields.refusal("layer_types", layer_types)  # transformers ignores it and uses the window
        if not layers:  # Description refuses a size of windows without layers
            return {}
        return {"window": window, "window_layers": layers}

    def _read_layer_types(self, fields: Fields, num_layers: int) -> list[str] | None:
        """Read ``layer_types``, in which mixers count as full attention; None if the field is absent."""
        layer_types = fields.layer_types(num_layers)
        if layer_types is None:
            return None
        if len(layer_types) < num_layers:
            raise fields.refusal("layer_types", layer_types)
        for layer, layer_type in enumerate(layer_types):
            if layer_type == self.mixer_layer_type:
                layer_types[layer] = "full_attention"
            elif layer < num_layers and layer_type not in ("full_attention", "sliding_attention"):
                raise fields.refusal(f"layer_types[{layer}]", fields.peek("layer_types")[layer])
        return layer_types

    def _window_layers(
        self, fields: Fields, num_layers: int, layer_types: list[str] | None, unrotated: Collection[int]
    ) -> tuple[int, ...]:
        """Return the layers with a sliding window, from ``layer_types`` or the rule of the architecture."""
        first_late = fields.take("max_window_layers", _MAX_WINDOW_LAYERS)
        layers = range(num_layers)
        if layer_types is not None:
            return layers_of_type(layer_types[:num_layers], "sliding_attention")
        if isinstance(self.window_layers, int):
            return all_but_every(num_layers, self.window_layers)
        if self.window_layers == "unrotated":
            return tuple(layer for layer in layers if layer in unrotated)
        if self.window_layers == "late":
            return tuple(range(first_late, num_layers))
        return tuple(layers)

    def _write_rope(self, d: Description) -> dict[str, Any]:
        if "none" in self.ropes:
            return {}
        if "by_layer_type" in self.ropes:
            return {"rope_parameters": write_rope_by_layer_type(d.rope_base, d.rope_scaling, d.rope_window_base)}
        config = {"rope_theta": d.rope_base, "rope_scaling": write_scaling(d.rope_scaling)}
        if "partial" in self.ropes:
            config["partial_rotary_factor"] = d.rope_dim / d.head_dim
        if d.rope_window_base is not None:
            config["rope_local_base_freq"] = d.rope_window_base
        return config

    def _write_windows(self, d: Description) -> dict[str, Any]:
        if self.windows == "none":
            return {}
        config: dict[str, Any] = {"sliding_window": d.window}
        if self.rotates_windows_only and d.window is None and d.unrotated_layers:
            config["sliding_window"] = d.max_seq_len  # of no layer, but it turns off RoPE in the others
        if self.windows == "use_sliding_window":
            config["use_sliding_window"] = d.window is not None
        if self.window_layers != "all":
            config["layer_types"] = write_layer_types(d.num_layers, d.window_layers, "sliding_attention")
        return config


def is_classifier(folder: str | Path) -> bool:
    """Return whether a folder holds a classifier or a reward model, as its ``config.json`` says; False without one."""
    config_file = Path(folder).expanduser() / "config.json"
    return config_file.is_file() and _describes_classifier(read_json(config_file))


def _describes_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` is that of a classifier or a reward model."""
    return (architecture_of(config) or "").endswith(_CLASSIFIER)


def _read_classes(config: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Read number and names of the classes, with the defaults of ``transformers``; no class for a language model."""
    if not _describes_classifier(config):
        return {"num_classes": 0}
    labels = fields.peek("id2label")
    if not isinstance(labels, dict):
        labels = {}
    num_classes = fields.take("num_labels", None) or len(labels) or 2  # the default of transformers
    classes: dict[str, Any] = {"num_classes": num_classes}
    # JSON has no keys that are numbers, but a dict in Python may have them.
    name_of_index = {str(index): str(name) for index, name in labels.items()}
    names = tuple(name_of_index.get(str(index), "") for index in range(num_classes))
    # Default names are left out of a description: a file has them, too, if its classes have no names.
    if all(names) and names != _default_names(num_classes):
        classes["class_names"] = names
    problem_type = fields.peek("problem_type")
    if isinstance(problem_type, str):
        classes["problem_type"] = problem_type
    return classes


def _default_names(num_classes: int) -> tuple[str, ...]:
    """Return the names that ``transformers`` gives to classes without names."""
    return tuple(f"LABEL_{index}" for index in range(num_classes))


# Formats of architectures that several families share or modify; names and defaults as in configuration_*.py of
# transformers.
LLAMA = HFFormat(
    "LlamaForCausalLM",
    "llama",
    "interleaved",
    biases="attention_bias",
    has_mlp_bias=True,
    defaults={"max_position_embeddings": 2048},
)
MISTRAL = HFFormat(
    "MistralForCausalLM",
    "mistral",
    "interleaved",
    windows="sliding_window",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
)
QWEN2 = HFFormat(
    "Qwen2ForCausalLM",
    "qwen2",
    "half",
    biases="qkv",
    windows="use_sliding_window",
    window_layers="late",
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
)
QWEN3 = HFFormat(
    "Qwen3ForCausalLM",
    "qwen3",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    windows="use_sliding_window",
    window_layers="late",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    },
)
