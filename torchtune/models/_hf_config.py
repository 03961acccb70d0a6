"""Reading and writing the ``config.json`` of Hugging Face decoders of the Llama shape."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchtune.models._description import Description, LinearRopeScaling, Llama3RopeScaling, ModelError

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}

# Fields that say nothing about the forward pass of a text decoder.
_HARMLESS = frozenset(
    """architectures model_type transformers_version torch_dtype dtype name_or_path initializer_range use_cache
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id pretraining_tp
    output_attentions output_hidden_states return_dict id2label label2id num_labels problem_type finetuning_task
    task_specific_params tokenizer_class prefix is_decoder is_encoder_decoder cross_attention_hidden_size
    add_cross_attention tie_encoder_decoder torchscript use_bfloat16 tf_legacy_loss pruned_heads
    chunk_size_feed_forward attn_implementation temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences num_beams num_beam_groups
    diversity_penalty max_length min_length do_sample early_stopping forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens output_scores
    return_dict_in_generate original_max_position_embeddings base_model_tp_plan is_llama_config
    unsloth_fixed unsloth_version transformers.js_config rope_interleaved classifier_dropout cache_implementation
    output_router_logits
    """.split()
)


@dataclass(frozen=True)
class HFFormat:
    """How one Hugging Face architecture spells a :class:`Description`.

    Attributes:
        architecture: entry of ``architectures``.
        model_type: value of ``model_type``.
        rope_layout: how *we* keep queries and keys of this architecture.
        biases: of the attention projections: none, on queries, keys and values, or as ``attention_bias`` says, then
            on the output too.
        output_bias: whether ``attention_bias`` is about the output too.
        has_mlp_bias: whether ``mlp_bias`` is a field of it.
        qk_norm: as in a description.
        windows: whether ``sliding_window`` switches windows on, or ``use_sliding_window`` must too, or there are none.
        full_every: where ``layer_types`` is left out, every so many layers one sees everything; 0: none does.
        ropes: what its positions may have: ``"partial"`` (only a part of a head turns), ``"window"`` (another base in
            layers with a window).
        activation: field of the activation, and its value where it is left out.
        fixed: (field, value) of a description that go without saying.
        read_more: fields of its own -> values of a description.
        write_more: the inverse.
        defaults: values of fields that a file leaves out.
    """

    architecture: str
    model_type: str
    rope_layout: Literal["interleaved", "half"]
    biases: Literal["none", "qkv", "attention_bias"] = "none"
    output_bias: bool = True
    has_mlp_bias: bool = False
    qk_norm: Literal["none", "before_rope"] = "none"
    windows: Literal["none", "sliding_window", "use_sliding_window"] = "none"
    full_every: int = 0
    ropes: tuple[Literal["partial", "window"], ...] = ()
    activation: tuple[str, str] = ("hidden_act", "silu")
    fixed: tuple[tuple[str, Any], ...] = ()
    read_more: Callable[["Fields"], dict[str, Any]] = lambda fields: {}
    write_more: Callable[[Description], dict[str, Any]] = lambda description: {}
    defaults: tuple[tuple[str, Any], ...] = ()

    def read(self, config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> Description:
        """A description from the contents of a ``config.json``.

        Args:
            config: the file's contents.
            ignore_fields: names of fields not to look at.

        Raises:
            ModelError: a field is missing, or says something that a description cannot express; it is named.
        """
        fields = Fields({**dict(self.defaults), **config}, self.architecture, set(ignore_fields))
        heads = fields.take("num_attention_heads")
        attention_bias = bool(fields.take("attention_bias", False)) if self.biases == "attention_bias" else False
        num_layers = fields.take("num_hidden_layers")
        qkv_bias = attention_bias or self.biases == "qkv"
        values = dict(
            vocab_size=fields.take("vocab_size"),
            num_layers=num_layers,
            embed_dim=fields.take("hidden_size"),
            intermediate_dim=fields.take("intermediate_size"),
            max_seq_len=fields.take("max_position_embeddings"),
            num_heads=heads,
            num_kv_heads=fields.take("num_key_value_heads", heads),
            head_dim=fields.take("head_dim", 0),
            attn_dropout=float(fields.take("attention_dropout", 0.0)),
            q_bias=qkv_bias,
            k_bias=qkv_bias,
            v_bias=qkv_bias,
            attn_output_bias=attention_bias and self.output_bias,
            qk_norm=self.qk_norm,
            rope_layout=self.rope_layout,
            activation=fields.choice(self.activation[0], _ACTIVATIONS, self.activation[1]),
            mlp_bias=bool(fields.take("mlp_bias", False)) if self.has_mlp_bias else False,
            norm_eps=float(fields.take("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(fields.take("tie_word_embeddings", False)),
            num_classes=_read_classes(config),
            **dict(self.fixed),
            **_read_rope(fields, self.ropes),
            **self._read_windows(fields, num_layers),
        )
        description = Description(**{**values, **self.read_more(fields)})
        fields.refuse_rest()
        return description

    def write(self, description: Description) -> dict[str, Any]:
        """The contents of a ``config.json`` with which ``transformers`` builds the same model.

        Raises:
            ModelError: this architecture cannot express the description; the field is named.
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
            self.activation[0]: _ACTIVATION_NAMES[description.activation],
            "max_position_embeddings": description.max_seq_len,
            "rms_norm_eps": description.norm_eps,
            "attention_dropout": description.attn_dropout,
            "tie_word_embeddings": description.tie_word_embeddings,
            "rope_theta": description.rope_base,
            "rope_scaling": _write_scaling(description.rope_scaling),
            **self._write_windows(description),
        }
        if "partial" in self.ropes:
            config["partial_rotary_factor"] = description.rope_dim / description.head_dim
        if description.rope_window_base is not None:
            config["rope_local_base_freq"] = description.rope_window_base
        if description.is_classifier:
            config["architectures"] = [self.architecture.replace("ForCausalLM", _CLASSIFIER)]
            config["id2label"] = {index: f"LABEL_{index}" for index in range(description.num_classes)}
        if self.biases == "attention_bias":
            config["attention_bias"] = description.attn_output_bias if self.output_bias else description.q_bias
        if self.has_mlp_bias:
            config["mlp_bias"] = description.mlp_bias
        config |= self.write_more(description)
        again = self.read(config)
        for field in dataclasses.fields(Description):
            if getattr(again, field.name) != getattr(description, field.name):
                raise ModelError(
                    f"The architecture {self.architecture} cannot express {field.name} = "
                    f"{getattr(description, field.name)!r} in a config.json (only {getattr(again, field.name)!r})."
                )
        return config

    def _read_windows(self, fields: "Fields", num_layers: int) -> dict[str, Any]:
        """``window`` and ``window_layers`` of a description."""
        window, kinds = fields.take("sliding_window", None), fields.take("layer_types", None)
        first = fields.take("max_window_layers", num_layers) if self.windows == "use_sliding_window" else 0
        fields.take("max_window_layers", None)
        switch = bool(fields.take("use_sliding_window", False))
        on = self.windows == "sliding_window" or switch
        if self.windows == "none" and (switch and window is not None):
            raise fields.refusal("sliding_window", window)
        if kinds is not None and not {"full_attention", "sliding_attention"}.issuperset(kinds[:num_layers]):
            raise fields.refusal("layer_types", kinds)
        if kinds is not None:
            layers = tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind == "sliding_attention")
        else:
            layers = tuple(i for i in range(first, num_layers) if not self.full_every or (i + 1) % self.full_every)
        if self.windows == "none" and kinds is not None and layers:
            raise fields.refusal("layer_types", kinds)
        return {"window": window, "window_layers": layers} if on and window is not None and layers else {}

    def _write_windows(self, d: Description) -> dict[str, Any]:
        if self.windows == "none" or (self.windows == "use_sliding_window" and d.window is None):
            return {}
        config: dict[str, Any] = {"sliding_window": d.window}
        if self.windows == "use_sliding_window":
            config["use_sliding_window"] = True
        if self.full_every or self.windows == "use_sliding_window":
            kinds = ("full_attention", "sliding_attention")
            config["layer_types"] = [kinds[layer in d.window_layers] for layer in range(d.num_layers)]
        return config


_CLASSIFIER = "ForSequenceClassification"


def _read_classes(config: Mapping[str, Any]) -> int:
    if not str((config.get("architectures") or [""])[0]).endswith(_CLASSIFIER):
        return 0
    return int(config.get("num_labels") or len(config.get("id2label") or (0, 1)))


class Fields:
    """A ``config.json`` that remembers what has been read."""

    _REQUIRED = object()

    def __init__(self, config: Mapping[str, Any], architecture: str, ignored: set[str]) -> None:
        self._config = config
        self._architecture = architecture
        self._seen = {*_HARMLESS, *ignored}

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """A field's value; ``null`` counts as absent where there is a default."""
        self._seen.add(name)
        value = self._config.get(name)
        if value is None:
            if default is self._REQUIRED:
                raise ModelError(f"config.json of {self._architecture} lacks the field '{name}'.")
            return default
        return value

    def choice(self, name: str, choices: Mapping[str, Any], default: str) -> Any:
        """A field's value, translated; refused if it is not among the choices."""
        value = self.take(name, default)
        if value not in choices:
            raise self.refusal(name, value)
        return choices[value]

    def has(self, name: str) -> bool:
        """Whether the file has the field, be it ``null``."""
        return name in self._config

    def peek(self, name: str) -> Any:
        """A field's value, not marked as read."""
        return self._config.get(name)

    def refusal(self, name: str, value: Any) -> ModelError:
        """The error for a field that cannot be expressed."""
        return ModelError(
            f"config.json of {self._architecture} has {name} = {value!r}, which a model description of this library "
            "cannot express; use a checkpoint without it, or name the field in ignore_fields if it changes nothing."
        )

    def refuse_rest(self) -> None:
        """Raise for the first field that nobody has read and that says something."""
        for name, value in self._config.items():
            if name not in self._seen and not name.startswith("_") and value not in (None, False, 0, [], {}, ""):
                raise self.refusal(name, value)


def _read_rope(fields: Fields, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Positions, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
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


def _read_scaling(fields: Fields, name: str, scaling: dict[str, Any]) -> Llama3RopeScaling | LinearRopeScaling | None:
    old_spelling, new_spelling = scaling.pop("type", None), scaling.pop("rope_type", None)
    kind = new_spelling or old_spelling or "default"
    if kind == "default":
        return None
    if kind not in ("llama3", "linear"):
        raise fields.refusal(name, fields.peek(name))
    try:
        if kind == "linear":
            return LinearRopeScaling(factor=float(scaling["factor"]))
        return Llama3RopeScaling(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_seq_len=int(scaling["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelError(f"config.json: {name} of type {kind} lacks the field {error}.") from error


def _write_scaling(scaling: Llama3RopeScaling | LinearRopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if isinstance(scaling, LinearRopeScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


LLAMA = HFFormat(
    "LlamaForCausalLM",
    "llama",
    "interleaved",
    biases="attention_bias",
    has_mlp_bias=True,
    defaults=(("max_position_embeddings", 2048),),
)
MISTRAL = HFFormat(
    "MistralForCausalLM",
    "mistral",
    "interleaved",
    windows="sliding_window",
    defaults=(("num_key_value_heads", 8), ("max_position_embeddings", 131_072)),
)
QWEN2 = HFFormat(
    "Qwen2ForCausalLM",
    "qwen2",
    "half",
    biases="qkv",
    windows="use_sliding_window",
    defaults=(("num_key_value_heads", 32), ("max_position_embeddings", 32_768)),
)
QWEN3 = HFFormat(
    "Qwen3ForCausalLM",
    "qwen3",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    windows="use_sliding_window",
    defaults=(("num_key_value_heads", 32), ("head_dim", 128), ("max_position_embeddings", 32_768)),
)
