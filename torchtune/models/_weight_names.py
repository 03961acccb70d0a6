"""Weight names shared by families: Hugging Face's Llama architecture, Meta's files, llama.cpp's GGUF."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torchtune.models._mixers import Names
from torchtune.models._weight_map import Identity, Op, Row, Tied, WeightMap
from torchtune.models._weight_ops import FusedExperts, InterleaveRope, Split, Stack

# The names in the following tables are in this order of formats.
_FORMATS = ("hf", "meta", "gguf")
_LAYER = {"hf": "model.layers.{layer}.", "meta": "layers.{layer}.", "gguf": "blk.{layer}."}
_HF_LAYER = _LAYER["hf"]
# Linear layers of a decoder layer, the layers that have them, and the attribute of the description for their bias.
_LINEARS = (
    # ours, Hugging Face, Meta, GGUF, when, bias
    ("attn.q_proj", "self_attn.q_proj", "attention.wq", "attn_q", "attn_layers !q_latent_dim", "q_bias"),
    ("attn.k_proj", "self_attn.k_proj", "attention.wk", "attn_k", "key_layers", "k_bias"),
    ("attn.v_proj", "self_attn.v_proj", "attention.wv", "attn_v", "value_layers", "v_bias"),
    ("attn.output_proj", "self_attn.o_proj", "attention.wo", "attn_output", "attn_layers", "attn_output_bias"),
    ("mlp.w1", "mlp.gate_proj", "feed_forward.w1", "ffn_gate", "mlp_layers", "mlp_bias"),
    ("mlp.w2", "mlp.down_proj", "feed_forward.w2", "ffn_down", "mlp_layers", "mlp_bias"),
    ("mlp.w3", "mlp.up_proj", "feed_forward.w3", "ffn_up", "mlp_layers mlp_gated", "mlp_bias"),
)
_NORMS = (
    # ours, Hugging Face, Meta, GGUF, when
    ("sa_norm", "input_layernorm", "attention_norm", "attn_norm", "sa_norm_layers"),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm", "ffn_norm", "mlp_norm_layers"),
    ("attn.q_norm", "self_attn.q_norm", "attention.q_norm", "attn_q_norm", "attn_layers has_qk_norm"),
    ("attn.k_norm", "self_attn.k_norm", "attention.k_norm", "attn_k_norm", "key_layers has_qk_norm"),
)
# Embeddings, final norm and output
_ENDS = (
    # ours, Hugging Face, Meta, GGUF, when
    ("tok_embeddings.weight", "model.embed_tokens.weight", "tok_embeddings.weight", "token_embd.weight", ""),
    ("norm.scale", "model.norm.weight", "norm.weight", "output_norm.weight", ""),
    ("output.weight", "lm_head.weight", "output.weight", "output.weight", "untied"),
)
# Fused projections: Hugging Face's module, ours, number of rows of each, layers, and attribute for the bias.
_FUSED = {
    "qkv": (
        "self_attn.qkv_proj",
        ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        ("q_dim", "kv_dim", "kv_dim"),
        "attn_layers",
        "q_bias",
    ),
    "gate_up": (
        "mlp.gate_up_proj",
        ("mlp.w1", "mlp.w3"),
        ("intermediate_dim", "intermediate_dim"),
        "mlp_layers",
        "mlp_bias",
    ),
}
# Our norms of a layer that a family may name -> the layers that have them.
_NORM_LAYERS = {
    "sa_norm": "sa_norm_layers",
    "mlp_norm": "mlp_norm_layers",
    "sa_scale": "has_post_norm",
    "mlp_scale": "has_post_norm",
}


def _rows(file_format: str, qk: Op) -> tuple[Row, ...]:
    """Return the rows of one format; ``qk`` reorders the rows of query and key projections."""
    column = _FORMATS.index(file_format)
    rows = []
    for tune, *names, when in _ENDS:
        rows.append(Row(names[column], tune, when=when))
    for tune, *names, when, bias in _LINEARS:
        external = f"{_LAYER[file_format]}{names[column]}"
        op: Op = Identity()
        if tune in ("attn.q_proj", "attn.k_proj"):
            op = qk
        bias_when = f"{when} {bias}"  # the row is there if both conditions hold
        if bias == "q_bias":
            # In latent attention, q_bias is the bias of the latent of queries.
            bias_when = "attn_layers q_bias !kv_latent_dim"
        rows.append(Row(f"{external}.weight", f"layers.{{layer}}.{tune}.weight", op, when))
        rows.append(Row(f"{external}.bias", f"layers.{{layer}}.{tune}.bias", op, bias_when))
    for tune, *names, when in _NORMS:
        op = Identity()
        if tune.startswith("attn."):  # norms of queries and keys have the order of their channels
            op = qk
        external = f"{_LAYER[file_format]}{names[column]}"
        rows.append(Row(f"{external}.weight", f"layers.{{layer}}.{tune}.scale", op, when))
    return tuple(rows)


def hf_names(
    qk: Op,
    norms: Mapping[str, str] | None = None,
    *,
    qk_norms: Mapping[str, str] | None = None,
    fused: tuple[str, ...] = (),
) -> WeightMap:
    """Make the weight map of a Hugging Face decoder with Llama's architecture.

    Args:
        qk: reorders the rows of query and key projections: ``InterleaveRope()`` if the checkpoint rotates the channel
            pairs (i, i + d/2) and the description has "interleaved"; ``Identity()`` if both have the same layout.
        norms: our name (``sa_norm``, ``sa_scale``, ``mlp_norm``, ``mlp_scale``) -> external name of a layer's norms; by
            default Llama's two.
        qk_norms: our name (``attn.q_norm``, ``attn.k_norm``) -> external name of the norms of queries and keys; by
            default ``self_attn.q_norm`` and ``self_attn.k_norm``.
        fused: projections that the checkpoint fuses: ``"qkv"``, ``"gate_up"``.
    """
    rows = [*_rows("hf", qk), Row("score.weight", "output.weight", when="is_classifier")]
    for norm, name in (qk_norms or {}).items():
        for index, row in enumerate(rows):
            if row.tune == f"layers.{{layer}}.{norm}.scale":
                rows[index] = replace(row, external=f"{_HF_LAYER}{name}.weight")
    # A family that names its norms has only those, and may have norms of outputs.
    if norms is not None:
        rows = [row for row in rows if not row.tune.endswith(("sa_norm.scale", "mlp_norm.scale"))]
        for norm, name in norms.items():
            tune = f"layers.{{layer}}.{norm}.scale"
            rows.append(Row(f"{_HF_LAYER}{name}.weight", tune, when=_NORM_LAYERS[norm]))
    for projection in fused:
        # Instead of the rows of the separate projections.
        name, modules, sizes, layers, bias = _FUSED[projection]
        weights = tuple(f"layers.{{layer}}.{module}.weight" for module in modules)
        biases = tuple(f"layers.{{layer}}.{module}.bias" for module in modules)
        rows = [row for row in rows if row.tune not in (*weights, *biases)]
        rows.append(Row(f"{_HF_LAYER}{name}.weight", weights, Split(sizes), when=layers))
        rows.append(Row(f"{_HF_LAYER}{name}.bias", biases, Split(sizes), when=f"{layers} {bias}"))
    return WeightMap(
        tuple(rows),
        tied=(Tied("lm_head.weight", "tok_embeddings.weight"),),
        # Frequencies of RoPE, which early releases of transformers saved, and a bias of classifiers, which it ignores.
        ignore=(
            "model.layers.{layer}.self_attn.rotary_emb.inv_freq",
            "model.rotary_emb.inv_freq",
            "score.bias",
        ),
    )


def experts(weight_map: WeightMap, block: str, gate: str, up: str, down: str, bias: str | None = None) -> WeightMap:
    """Add mixtures of experts to a weight map, for checkpoints with one tensor per expert and matrix.

    Args:
        weight_map: Hugging Face map of all other weights.
        block: external name of the mixture in a layer, the parent of ``gate`` and ``experts``.
        gate: external name of an expert's ``gate_proj``.
        up: external name of an expert's ``up_proj``.
        down: external name of an expert's ``down_proj``.
        bias: external name, in the mixture, of the router's selection bias.
    """
    external = f"{_HF_LAYER}{block}."
    tune = "layers.{layer}.mlp."
    stack = Stack(transpose=True)  # files have a matrix [out, in] for each expert; ours are one tensor [e, in, out]
    rows = [Row(f"{external}gate.weight", f"{tune}router.gate.weight", when="expert_layers")]
    if bias is not None:
        rows.append(Row(f"{external}{bias}", f"{tune}router.selection_bias", when="expert_layers"))
    for matrix, name, when in (
        ("gate_proj", gate, "expert_layers mlp_gated"),
        ("up_proj", up, "expert_layers"),
        ("down_proj", down, "expert_layers"),
    ):
        rows.append(Row(f"{external}experts.{{expert}}.{name}.weight", f"{tune}experts.{matrix}", stack, when))
    return weight_map.extended(rows)


def with_fused_experts(weight_map: WeightMap, block: str, *, transpose: bool = True, both: bool = False) -> WeightMap:
    """Convert a weight map with one tensor per expert to checkpoints with two fused tensors per layer.

    Args:
        weight_map: Hugging Face map.
        block: external name of the mixture in a layer, the parent of ``experts``.
        transpose: whether the external matrices are ``[out, in]``; otherwise they are ``[in, out]`` like ours, and
            ``peft`` swaps the two dimensions.
        both: whether both layouts exist: published files have ``[in, out]``, modules and files of ``transformers`` have
            ``[out, in]``.
    """
    external = f"{_HF_LAYER}{block}.experts."
    tune = "layers.{layer}.mlp.experts."
    rows = [row for row in weight_map.rows if not row.tune_templates[0].startswith(tune)]
    gate_up = FusedExperts(parts=2, transpose=transpose and not both, peft_swaps=not transpose, both=both)
    down = replace(gate_up, parts=1)
    rows.append(Row(f"{external}gate_up_proj", (f"{tune}gate_proj", f"{tune}up_proj"), gate_up, when="expert_layers"))
    rows.append(Row(f"{external}down_proj", f"{tune}down_proj", down, when="expert_layers"))
    return replace(weight_map, rows=tuple(rows))


def shared_expert(weight_map: WeightMap, block: str, gate: str | None = None) -> WeightMap:
    """Add the shared expert of every layer with experts to a weight map.

    Args:
        weight_map: Hugging Face map of all other weights.
        block: external name of the shared expert in a layer.
        gate: external name of the shared expert's gate; None if it has no gate.
    """
    external = f"{_HF_LAYER}{block}."
    tune = "layers.{layer}.mlp."
    when = "expert_layers shared_expert_dim"
    rows = [
        Row(f"{external}gate_proj.weight", f"{tune}shared_expert.w1.weight", when=when),
        Row(f"{external}down_proj.weight", f"{tune}shared_expert.w2.weight", when=when),
        Row(f"{external}up_proj.weight", f"{tune}shared_expert.w3.weight", when=f"{when} mlp_gated"),
    ]
    if gate is not None:
        external_gate = f"{_HF_LAYER}{gate}.weight"
        rows.append(Row(external_gate, f"{tune}shared_gate.weight", when=f"{when} shared_expert_gate"))
    return weight_map.extended(rows)


def mixers(weight_map: WeightMap, names: Names, module: str = "attn") -> WeightMap:
    """Add mixers, which replace or accompany attention in some layers, to a weight map.

    Args:
        weight_map: Hugging Face map of all other weights.
        names: (external name within a layer, our name within the mixer) of each parameter of the mixer, and optionally
            an op that reorders its rows.
        module: our name of the mixer: ``attn``, or ``mixer`` if it is parallel to attention.
    """
    rows = []
    for name, parameter, *op in names:
        when = "mixer_layers"
        if parameter.startswith("norm."):
            when = "mixer_layers mixer_has_norm"
        rows.append(Row(f"{_HF_LAYER}{name}", f"layers.{{layer}}.{module}.{parameter}", *op, when=when))
    return weight_map.extended(rows)


def latent_attention(weight_map: WeightMap) -> WeightMap:
    """Add latent attention to a weight map, with DeepSeek's names."""
    rows = []
    for name, parameter, when in (
        ("q_a_proj.weight", "q_down_proj.weight", "q_latent_dim"),
        ("q_a_proj.bias", "q_down_proj.bias", "q_latent_dim q_bias"),
        ("q_a_layernorm.weight", "q_down_norm.scale", "q_latent_dim"),
        ("q_b_proj.weight", "q_proj.weight", "q_latent_dim"),
        ("kv_a_proj_with_mqa.weight", "kv_down_proj.weight", "kv_latent_dim"),
        ("kv_a_proj_with_mqa.bias", "kv_down_proj.bias", "kv_latent_dim k_bias"),
        ("kv_a_layernorm.weight", "kv_down_norm.scale", "kv_latent_dim"),
        ("kv_b_proj.weight", "kv_proj.weight", "kv_latent_dim"),
    ):
        external = f"{_HF_LAYER}self_attn.{name}"
        rows.append(Row(external, f"layers.{{layer}}.attn.{parameter}", when=f"attn_layers {when}"))
    return weight_map.extended(rows)


def renamed(weight_map: WeightMap, names: Mapping[str, str]) -> WeightMap:
    """Replace parts of the external names in a weight map.

    Args:
        weight_map: Hugging Face map, each row with one external name.
        names: maps parts of external names to their replacements.
    """
    rows = []
    for row in weight_map.rows:
        external = row.external
        for part, replacement in names.items():
            external = external.replace(part, replacement)
        rows.append(replace(row, external=external))
    return replace(weight_map, rows=tuple(rows))


def attention_names(module: str = "self_attn", output: str = "o_proj") -> list[tuple[str, str]]:
    """Return the names of the linear layers of attention, (ours, external), with ``module`` as external prefix."""
    names = [(f"attn.{name}_proj", f"{module}.{name}_proj") for name in "qkv"]
    return [*names, ("attn.output_proj", f"{module}.{output}")]


def gated_names(module: str = "mlp") -> list[tuple[str, str]]:
    """Return the names of the linear layers of a gated feed-forward layer, (ours, external)."""
    return [
        ("mlp.w1", f"{module}.gate_proj"),
        ("mlp.w2", f"{module}.down_proj"),
        ("mlp.w3", f"{module}.up_proj"),
    ]


def module_rows(
    external_prefix: str,
    tune_prefix: str,
    modules: Iterable[tuple[str, str]],
    parameters: Sequence[str] = ("weight", "bias"),
    when: str = "",
) -> list[Row]:
    """Make the rows of modules.

    Args:
        external_prefix: prefix of the external names.
        tune_prefix: prefix of our names.
        modules: the remaining part of each module's name: (ours, external).
        parameters: our names of each module's parameters; the external name of ``scale`` is ``weight``.
        when: see :class:`Row`.
    """
    rows = []
    for tune_module, external_module in modules:
        for parameter in parameters:
            external_parameter = "weight" if parameter == "scale" else parameter
            external = f"{external_prefix}{external_module}.{external_parameter}"
            rows.append(Row(external, f"{tune_prefix}{tune_module}.{parameter}", when=when))
    return rows


# Hugging Face names of families with rope_layout "interleaved" (Llama, Mistral, SmolLM2).
HF_INTERLEAVED = hf_names(InterleaveRope())
# Hugging Face names of families with rope_layout "half", the layout of Hugging Face (Qwen).
HF_HALF = hf_names(Identity())
# Meta's consolidated files have interleaved queries and keys, like ours, and a copy of a tied output projection.
META = WeightMap(
    _rows("meta", Identity()),
    tied=(Tied("output.weight", "tok_embeddings.weight", write=True),),
    ignore=("rope.freqs",),
)
# As in our weights, llama.cpp interleaves the rows of queries and keys for Llama, but not for Qwen.
GGUF = WeightMap(
    _rows("gguf", Identity()),
    tied=(Tied("output.weight", "tok_embeddings.weight"),),
    ignore=("rope_freqs.weight",),
)
