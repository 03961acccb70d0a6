"""Reading and writing the ``config.json`` of Hugging Face decoders of the Llama shape."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchtune.models._description import Description, Llama3RopeScaling, ModelError

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
    return_dict_in_generate max_window_layers original_max_position_embeddings base_model_tp_plan is_llama_config
    unsloth_fixed unsloth_version transformers.js_config use_sliding_window rope_interleaved
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
        has_mlp_bias: whether ``mlp_bias`` is a field of it.
        qk_norm: as in a description.
        windowed: whether ``sliding_window`` alone switches a window on (else ``use_sliding_window`` must too).
        defaults: values of fields that a file leaves out.
    """

    architecture: str
    model_type: str
    rope_layout: Literal["interleaved", "half"]
    biases: Literal["none", "qkv", "attention_bias"] = "none"
    has_mlp_bias: bool = False
    qk_norm: Literal["none", "before_rope"] = "none"
    windowed: bool = False
    defaults: tuple[tuple[str, Any], ...] = ()

    def read(self, config: Mapping[str, Any], ignore_fields: Collection[str] = ()) -> Description:
        """A description from the contents of a ``config.json``.

        Args:
            config: the file's contents.
            ignore_fields: names of fields not to look at.

        Raises:
            ModelError: a field is missing, or says something that a description cannot express; it is named.
        """
        fields = _Fields({**dict(self.defaults), **config}, self.architecture, set(ignore_fields))
        heads = fields.take("num_attention_heads")
        attention_bias = bool(fields.take("attention_bias", False)) if self.biases == "attention_bias" else False
        self._refuse_windows(fields)
        base, scaling = _read_rope(fields)
        qkv_bias = attention_bias or self.biases == "qkv"
        description = Description(
            vocab_size=fields.take("vocab_size"),
            num_layers=fields.take("num_hidden_layers"),
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
            attn_output_bias=attention_bias,
            qk_norm=self.qk_norm,
            rope_base=base,
            rope_layout=self.rope_layout,
            rope_scaling=scaling,
            activation=fields.choice("hidden_act", _ACTIVATIONS, "silu"),
            mlp_bias=bool(fields.take("mlp_bias", False)) if self.has_mlp_bias else False,
            norm_eps=float(fields.take("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(fields.take("tie_word_embeddings", False)),
        )
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
            "hidden_act": _ACTIVATION_NAMES[description.activation],
            "max_position_embeddings": description.max_seq_len,
            "rms_norm_eps": description.norm_eps,
            "attention_dropout": description.attn_dropout,
            "tie_word_embeddings": description.tie_word_embeddings,
            "rope_theta": description.rope_base,
            "rope_scaling": _write_scaling(description.rope_scaling),
        }
        if self.biases == "attention_bias":
            config["attention_bias"] = description.attn_output_bias
        if self.has_mlp_bias:
            config["mlp_bias"] = description.mlp_bias
        if self.windowed:
            config["sliding_window"] = None
        again = self.read(config)
        for field in dataclasses.fields(Description):
            if getattr(again, field.name) != getattr(description, field.name):
                raise ModelError(
                    f"The architecture {self.architecture} cannot express {field.name} = "
                    f"{getattr(description, field.name)!r} in a config.json (only {getattr(again, field.name)!r})."
                )
        return config

    def _refuse_windows(self, fields: "_Fields") -> None:
        switched_on = self.windowed or bool(fields.peek("use_sliding_window"))
        window = fields.take("sliding_window", None)
        if switched_on and window is not None:
            raise fields.refusal("sliding_window", window)
        kinds = fields.take("layer_types", None) or ["full_attention"]
        if set(kinds) != {"full_attention"}:
            raise fields.refusal("layer_types", kinds)


class _Fields:
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


def _read_rope(fields: _Fields) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    together = fields.take("rope_parameters", None)
    base = fields.take("rope_theta", 10_000.0)
    name, scaling = "rope_scaling", fields.take("rope_scaling", None)
    if together is not None:
        base = together.get("rope_theta", base)
        name, scaling = "rope_parameters", {key: value for key, value in together.items() if key != "rope_theta"}
    if float(fields.take("partial_rotary_factor", 1.0)) != 1.0:
        raise fields.refusal("partial_rotary_factor", fields.peek("partial_rotary_factor"))
    if not scaling:
        return float(base), None
    scaling = dict(scaling)
    old_spelling, new_spelling = scaling.pop("type", None), scaling.pop("rope_type", None)
    kind = new_spelling or old_spelling or "default"
    if kind == "default" and scaling.get("partial_rotary_factor", 1.0) == 1.0:
        return float(base), None
    if kind != "llama3":
        raise fields.refusal(name, fields.peek(name))
    try:
        return float(base), Llama3RopeScaling(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_seq_len=int(scaling["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelError(f"config.json: {name} of type llama3 lacks the field {error}.") from error


def _write_scaling(scaling: Llama3RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
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
    windowed=True,
    defaults=(("num_key_value_heads", 8), ("max_position_embeddings", 131_072)),
)
QWEN2 = HFFormat(
    "Qwen2ForCausalLM",
    "qwen2",
    "half",
    biases="qkv",
    defaults=(("num_key_value_heads", 32), ("max_position_embeddings", 32_768)),
)
QWEN3 = HFFormat(
    "Qwen3ForCausalLM",
    "qwen3",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    defaults=(("num_key_value_heads", 32), ("head_dim", 128), ("max_position_embeddings", 32_768)),
)
