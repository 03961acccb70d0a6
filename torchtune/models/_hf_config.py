"""Reading and writing the ``config.json`` of Hugging Face decoders of the Llama shape."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchtune.models._description import Description, ModelError
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_rope import read_rope, write_scaling
from torchtune.models._rope_scaling import LongRopeScaling

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


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
        own: fields of its own: (theirs, ours, value where it is left out, whose type it has).
        read_more: what else a file says -> values of a description.
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
    own: tuple[tuple[str, str, Any], ...] = ()
    read_more: Callable[[Fields], dict[str, Any]] = lambda fields: {}
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
            **read_rope(fields, self.ropes),
            **self._read_windows(fields, num_layers),
            **{ours: type(default)(fields.take(theirs, default)) for theirs, ours, default in self.own},
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
            "rope_scaling": write_scaling(description.rope_scaling),
            **self._write_windows(description),
            **{theirs: getattr(description, ours) for theirs, ours, _ in self.own},
        }
        if "partial" in self.ropes:
            config["partial_rotary_factor"] = description.rope_dim / description.head_dim
        if description.rope_window_base is not None:
            config["rope_local_base_freq"] = description.rope_window_base
        if isinstance(description.rope_scaling, LongRopeScaling):  # some architectures read it there alone
            config["original_max_position_embeddings"] = description.rope_scaling.original_max_seq_len
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

    def _read_windows(self, fields: Fields, num_layers: int) -> dict[str, Any]:
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
