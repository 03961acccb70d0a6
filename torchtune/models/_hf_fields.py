"""Typed access to the fields of a Hugging Face ``config.json``."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchtune.models._description import ModelError

# Fields that do not affect the forward pass of a text decoder. ``auto_map`` names code beside the weights, which this
# library does not run, nor does transformers for an architecture that it has itself.
_HARMLESS = frozenset(
    """architectures model_type auto_map transformers_version torch_dtype dtype name_or_path initializer_range
    use_cache bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id pretraining_tp
    output_attentions output_hidden_states return_dict id2label label2id num_labels problem_type finetuning_task
    task_specific_params tokenizer_class prefix is_decoder is_encoder_decoder cross_attention_hidden_size
    add_cross_attention tie_encoder_decoder torchscript use_bfloat16 tf_legacy_loss pruned_heads
    chunk_size_feed_forward attn_implementation temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences num_beams num_beam_groups
    diversity_penalty max_length min_length do_sample early_stopping forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens output_scores
    return_dict_in_generate original_max_position_embeddings base_model_tp_plan is_llama_config
    unsloth_fixed unsloth_version transformers.js_config rope_interleaved classifier_dropout cache_implementation
    output_router_logits initial_context_length experts_per_token
    """.split()
)

# Integer fields with their own upper limit: those without a default, and those that decide about the number of modules.
_SIZES = """max_position_embeddings original_max_position_embeddings sliding_window max_window_layers hidden_size
    intermediate_size moe_intermediate_size vocab_size hidden_size_per_layer_input vocab_size_per_layer_input
    moe_latent_size mamba_d_ssm"""
_COUNTS = """num_attention_heads num_key_value_heads head_dim num_hidden_layers num_experts num_local_experts
    num_experts_per_tok num_labels decoder_sparse_step no_rope_layer_interval sliding_window_pattern global_head_dim
    num_global_key_value_heads num_kv_shared_layers top_k_experts rotary_dim num_dense_layers conv_L_cache
    mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_num_heads mamba_head_dim n_groups
    ssm_state_size conv_kernel n_routed_experts n_shared_experts linear_num_key_heads linear_num_value_heads
    linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"""
# Largest value of each integer field; a description has lower limits for sizes.
_WHOLE = dict.fromkeys(_SIZES.split(), 2**40) | dict.fromkeys(_COUNTS.split(), 2**16)
_WHOLE["shared_intermediate_size"] = 2**22
# Largest value of other integer fields, which a description limits further.
_LARGEST = 2**40
# Numbers whose default is None or a whole number.
_NUMBERS = frozenset(
    {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq"}
)
# Flags in which null means false, as in transformers.
_FLAGS = frozenset(
    """attention_bias mlp_bias tie_word_embeddings use_sliding_window norm_topk_prob attention_out_bias use_bias
    attention_k_eq_v enable_moe_block use_double_wide_mlp use_expert_bias conv_bias tie_embedding rope_interleave
    mamba_conv_bias mamba_proj_bias mamba_rms_norm mamba_norm_before_gate projectors_bias use_conv_bias
    block_auto_adjust_ff_dim is_causal""".split()
)
_OBJECTS = frozenset({"rope_parameters", "rope_scaling", "quantization_config"})

# Names of layer types before transformers 5 -> their names since.
_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
# Names of activations in transformers (ACT2FN) -> in a description, and the other way round.
HF_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
HF_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}


def no_values(*arguments: Any) -> dict[str, Any]:
    """Return no values: the default of a format's functions, which unlike a lambda is pickled with a model."""
    return {}


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number within float32's range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e38


def is_whole(value: Any, most: float) -> bool:
    """Return whether ``value`` is a whole number from 0 to ``most``."""
    return is_number(value) and 0 <= value <= most and value == int(value)


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """Return the first entry of ``architectures``, or None.

    Raises:
        ModelError: ``architectures`` is not a list of names.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"config.json has architectures = {format_value(names)}, which is not a list of names: download it again."
        )
    return names[0] if names else None


def format_value(value: Any) -> str:
    """Format a value for error messages, shortened."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]} …"


class Fields:
    """Fields of a ``config.json``, with a record of the fields that were read."""

    _REQUIRED = object()

    def __init__(self, config: Mapping[str, Any], architecture: str, ignored: set[str]) -> None:
        self._config = config
        self._architecture = architecture
        self._seen = {*_HARMLESS, *ignored}

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field's value, or the default if it is absent or ``null``; for a flag, ``null`` means false.

        The type of a field is in the tables above or, for other fields, that of the default. Later,
        :meth:`refuse_unread` does not refuse this field.

        Raises:
            ModelError: the field is absent and has no default, or has the wrong type.
        """
        self._seen.add(name)
        value = self._config.get(name)
        if value is None:
            if name in _FLAGS and name in self._config:
                return False
            if default is self._REQUIRED:
                raise ModelError(f"config.json of {self._architecture} lacks the field '{name}'.")
            return default
        if name in _FLAGS:
            self._expect(isinstance(value, bool) or value in (0, 1), name, value, "true or false")
        elif name in _OBJECTS:
            self._expect(isinstance(value, Mapping), name, value, "an object")
        elif name in _NUMBERS:
            self._expect(is_number(value), name, value, "a finite number")
        elif name in _WHOLE or type(default) is int:
            most = _WHOLE.get(name, _LARGEST)
            self._expect(is_whole(value, most), name, value, f"a whole number from 0 to {most:,}")
            return int(value)  # 8.0 is a whole number, too
        elif type(default) is float:
            self._expect(is_number(value), name, value, "a finite number")
        elif type(default) is bool:  # published files have numbers in some of these fields, of which 0 is false
            self._expect(is_number(value) or isinstance(value, bool), name, value, "true or false")
        return value

    def skip(self, *names: str) -> None:
        """Mark fields that do not affect the model as read."""
        for name in names:
            self.take(name, None)

    def require(self, **values: Any) -> None:
        """Raise :class:`ModelError` if a field is present and differs from the only supported value."""
        for name, value in values.items():
            if self.take(name, None) not in (None, value):
                raise self.refusal(name, self.peek(name))

    def list_of(
        self, name: str, num_layers: int, value_type: type, default: list[Any] | None = None
    ) -> list[Any] | None:
        """Return a list field (one value per layer, or layer indices), or the default if the field is absent.

        ``num_layers`` is only named in the error: the length is not checked.
        """
        values = self.take(name, None)
        if values is None:
            return default
        fits = isinstance(values, list) and all(isinstance(value, value_type) for value in values)
        self._expect(fits, name, values, f"a list for {num_layers} layers")
        return values

    def layer_types(self, num_layers: int) -> list[str] | None:
        """Return a copy of ``layer_types`` with the names of transformers 5; None if the field is absent."""
        layer_types = self.list_of("layer_types", num_layers, str)
        if layer_types is None:
            return None
        return [_LAYER_TYPES.get(layer_type, layer_type) for layer_type in layer_types]

    def _expect(self, fits: bool, name: str, value: Any, wanted: str) -> None:
        if not fits:
            raise ModelError(
                f"config.json of {self._architecture} has {name} = {format_value(value)}, where {wanted} is expected: "
                "download it again, or correct it."
            )

    def typed(self, name: str, default: Any) -> Any:
        """Return a field's value in the type of its default; a list of equal numbers counts as one number."""
        self._seen.add(name)
        value = self.peek(name)
        if value is None:
            value = default
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(default) is int:
            fits = is_whole(value, 2**22)
        else:
            fits = is_number(value) or isinstance(value, bool)
        if not fits:
            raise self.refusal(name, value)
        return type(default)(value)

    def choice(self, name: str, choices: Mapping[str, Any], default: str) -> Any:
        """Return the entry of ``choices`` for a field's value. Raises :class:`ModelError` for other values."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refusal(name, value)
        return choices[value]

    def has(self, name: str) -> bool:
        """Return whether the file has the field, even if it is ``null``."""
        return name in self._config

    def peek(self, name: str) -> Any:
        """Return a field's value without marking it as read."""
        return self._config.get(name)

    def refusal(self, name: str, value: Any, *, is_unread: bool = False) -> ModelError:
        """Make the error for an unsupported value; with ``is_unread``, it suggests ignoring the field."""
        ignore = ", or name the field in ignore_fields if it changes nothing" if is_unread else ""
        return ModelError(
            f"config.json of {self._architecture} has {name} = {format_value(value)}, which a model description of "
            f"this library cannot express; use a checkpoint without it{ignore}."
        )

    def refuse_unread(self) -> None:
        """Raise for the first unread field that may affect the model."""
        for name, value in self._config.items():
            has_no_effect = name in self._seen or name.startswith("_") or value in (None, False, 0, [], {}, "")
            if not has_no_effect:
                raise self.refusal(name, value, is_unread=True)


def layers_of_type(layer_types: Sequence[str], layer_type: str) -> tuple[int, ...]:
    """Return the layers with this entry in ``layer_types``."""
    return tuple(layer for layer, entry in enumerate(layer_types) if entry == layer_type)


def all_but_every(num_layers: int, interval: int) -> tuple[int, ...]:
    """Return all layers except every ``interval``-th: 0, 1, 2, 4, 5, 6 … for 4."""
    return tuple(layer for layer in range(num_layers) if (layer + 1) % interval)


def write_layer_types(
    num_layers: int, layers: Collection[int], layer_type: str, other: str = "full_attention"
) -> list[str]:
    """Make ``layer_types`` of a ``config.json``: ``layer_type`` for ``layers``, ``other`` for all others."""
    layer_types = [other] * num_layers
    for layer in layers:
        layer_types[layer] = layer_type
    return layer_types
