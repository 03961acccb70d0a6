"""Weight names shared by families: Hugging Face's Llama architecture, Meta's files, llama.cpp's GGUF."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torchtune.models._mixers import Names
from torchtune.models._weight_map import Row, Tied, WeightMap
from torchtune.models._weight_ops import FusedExperts, Identity, InterleaveRope, Op, Split, Stack

# Modules of a layer: name in each format, and attribute of the description that states the condition.
_LINEARS = (
    # ours, Hugging Face, Meta, GGUF, bias
    ("attn.q_proj", "self_attn.q_proj", "attention.wq", "attn_q", "q_bias"),
    ("attn.k_proj", "self_attn.k_proj", "attention.wk", "attn_k", "k_bias"),
    ("attn.v_proj", "self_attn.v_proj", "attention.wv", "attn_v", "v_bias"),
    ("attn.output_proj", "self_attn.o_proj", "attention.wo", "attn_output", "attn_output_bias"),
    ("mlp.w1", "mlp.gate_proj", "feed_forward.w1", "ffn_gate", "mlp_bias"),
    ("mlp.w2", "mlp.down_proj", "feed_forward.w2", "ffn_down", "mlp_bias"),
    ("mlp.w3", "mlp.up_proj", "feed_forward.w3", "ffn_up", "mlp_bias"),
)
_NORMS = (
    # ours, Hugging Face, Meta, GGUF, when
    ("sa_norm", "input_layernorm", "attention_norm", "attn_norm", "sa_norm_layers"),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm", "ffn_norm", "mlp_norm_layers"),
    ("attn.q_norm", "self_attn.q_norm", "attention.q_norm", "attn_q_norm", "has_qk_norm"),
    ("attn.k_norm", "self_attn.k_norm", "attention.k_norm", "attn_k_norm", "has_qk_norm"),
)
# Embeddings, final norm, output: ours, Hugging Face, Meta, GGUF, when
_ENDS = (
    ("tok_embeddings.weight", "model.embed_tokens.weight", "tok_embeddings.weight", "token_embd.weight", ""),
    ("norm.scale", "model.norm.weight", "norm.weight", "output_norm.weight", ""),
    ("output.weight", "lm_head.weight", "output.weight", "output.weight", "untied"),
)
# Fused projections: Hugging Face's module, ours, rows of each, attributes for weight and bias.
_FUSED = {
    "qkv": (
        "self_attn.qkv_proj",
        ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        ("q_dim", "kv_dim", "kv_dim"),
        "q_bias",
    ),
    "gate_up": ("mlp.gate_up_proj", ("mlp.w1", "mlp.w3"), ("intermediate_dim",) * 2, "mlp_bias"),
}
# Conditions of projections that some layers lack.
_WHERE = {
    "attn.q_proj": "attn_layers !q_latent_dim",
    "attn.k_proj": "key_layers",
    "attn.v_proj": "value_layers",
    "mlp.w3": "mlp_layers mlp_gated",
}
_SHARED = "expert_layers shared_expert_dim"
_HF, _META, _GGUF = 1, 2, 3
_LAYER = {_HF: "model.layers.{layer}.", _META: "layers.{layer}.", _GGUF: "blk.{layer}."}


def _rows(column: int, qk: Op) -> tuple[Row, ...]:
    """Return the rows of one format; ``qk`` reorders the rows of query and key projections."""
    rows = [Row(row[column], row[0], when=row[4]) for row in _ENDS]
    for row in _LINEARS:
        op = qk if row[0] in ("attn.q_proj", "attn.k_proj") else Identity()
        external, ours = _LAYER[column] + row[column], "layers.{layer}." + row[0]
        when = _WHERE.get(row[0], "mlp_layers" if row[0].startswith("mlp.") else "attn_layers")
        rows.append(Row(f"{external}.weight", f"{ours}.weight", op, when))
        rows.append(Row(f"{external}.bias", f"{ours}.bias", op, _when_bias(when, row[4])))
    for row in _NORMS:
        where = "key_layers" if row[0] == "attn.k_norm" else "attn_layers"
        op, when = (qk, f"{where} has_qk_norm") if row[4] == "has_qk_norm" else (Identity(), row[4])
        rows.append(Row(f"{_LAYER[column]}{row[column]}.weight", f"layers.{{layer}}.{row[0]}.scale", op, when=when))
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
    rows = [*_rows(_HF, qk), Row("score.weight", "output.weight", when="is_classifier")]
    for ours, theirs in (qk_norms or {}).items():
        tune = f"layers.{{layer}}.{ours}.scale"
        rows = [replace(row, external=f"{_LAYER[_HF]}{theirs}.weight") if row.tune == tune else row for row in rows]
    if norms is not None:
        rows = [row for row in rows if not str(row.tune).endswith(("sa_norm.scale", "mlp_norm.scale"))]
        rows += [
            Row(f"{_LAYER[_HF]}{theirs}.weight", f"layers.{{layer}}.{ours}.scale", when=_when_norm(ours))
            for ours, theirs in norms.items()
        ]
    for name in fused:
        external, ours, sizes, bias = _FUSED[name]
        where = "attn_layers" if name == "qkv" else "mlp_layers"
        parts = tuple(f"layers.{{layer}}.{part}.weight" for part in ours)
        biases = tuple(part.replace(".weight", ".bias") for part in parts)
        rows = [row for row in rows if row.tune not in parts and row.tune not in biases]
        rows.append(Row(f"{_LAYER[_HF]}{external}.weight", parts, Split(sizes), when=where))
        rows.append(Row(f"{_LAYER[_HF]}{external}.bias", biases, Split(sizes), when=f"{where} {bias}"))
    return WeightMap(
        tuple(rows),
        tied=(Tied("lm_head.weight", "tok_embeddings.weight"),),
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
    theirs, ours = f"{_LAYER[_HF]}{block}.", "layers.{layer}.mlp."
    rows = [Row(f"{theirs}gate.weight", f"{ours}router.gate.weight", when="expert_layers")]
    if bias is not None:
        rows.append(Row(f"{theirs}{bias}", f"{ours}router.selection_bias", when="expert_layers"))
    for name, matrix in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        external = f"{theirs}experts.{{expert}}.{matrix}.weight"
        where = "expert_layers mlp_gated" if name == "gate_proj" else "expert_layers"
        rows.append(Row(external, f"{ours}experts.{name}", Stack(transpose=True), where))
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
    theirs, ours = f"{_LAYER[_HF]}{block}.experts.", "layers.{layer}.mlp.experts."
    rows = [row for row in weight_map.rows if not str(row.tune).startswith(ours)]
    inputs = (f"{ours}gate_proj", f"{ours}up_proj")
    op = partial(FusedExperts, transpose=transpose and not both, peft_swaps=not transpose, both=both)
    for name, tune, parts in (("gate_up_proj", inputs, 2), ("down_proj", f"{ours}down_proj", 1)):
        rows.append(Row(f"{theirs}{name}", tune, op(parts), "expert_layers"))
    return replace(weight_map, rows=tuple(rows))


def shared_expert(weight_map: WeightMap, block: str, gate: str | None = None) -> WeightMap:
    """Add the shared expert of every layer with experts to a weight map.

    Args:
        weight_map: Hugging Face map of all other weights.
        block: external name of the shared expert in a layer.
        gate: external name of the shared expert's gate; None if it has no gate.
    """
    ours = "layers.{layer}.mlp."
    rows = [
        Row(f"{_LAYER[_HF]}{block}.{theirs}.weight", f"{ours}shared_expert.{name}.weight", when=f"{_SHARED} {where}")
        for name, theirs, where in (
            ("w1", "gate_proj", ""),
            ("w2", "down_proj", ""),
            ("w3", "up_proj", "mlp_gated"),
        )
    ]
    if gate is not None:
        rows.append(
            Row(f"{_LAYER[_HF]}{gate}.weight", f"{ours}shared_gate.weight", when=f"{_SHARED} shared_expert_gate")
        )
    return weight_map.extended(rows)


def mixers(weight_map: WeightMap, names: Names, place: str = "attn") -> WeightMap:
    """Add mixers, which replace or accompany attention in some layers, to a weight map.

    Args:
        weight_map: Hugging Face map of all other weights.
        names: (external name within a layer, our name within the mixer) of each parameter of the mixer.
        place: our name of the mixer: ``attn``, or ``mixer`` if it is parallel to attention.
    """
    rows = []
    for theirs, ours, *op in names:
        when = "mixer_layers mixer_has_norm" if ours.startswith("norm.") else "mixer_layers"
        rows.append(Row(f"{_LAYER[_HF]}{theirs}", f"layers.{{layer}}.{place}.{ours}", *op, when=when))
    return weight_map.extended(rows)


def latent_attention(weight_map: WeightMap) -> WeightMap:
    """Add latent attention to a weight map, with DeepSeek's names."""
    theirs, ours = f"{_LAYER[_HF]}self_attn.", "layers.{layer}.attn."
    rows = [
        Row(f"{theirs}{external}", f"{ours}{name}", when=f"attn_layers {when}")
        for external, name, when in (
            ("q_a_proj.weight", "q_down_proj.weight", "q_latent_dim"),
            ("q_a_proj.bias", "q_down_proj.bias", "q_latent_dim q_bias"),
            ("q_a_layernorm.weight", "q_down_norm.scale", "q_latent_dim"),
            ("q_b_proj.weight", "q_proj.weight", "q_latent_dim"),
            ("kv_a_proj_with_mqa.weight", "kv_down_proj.weight", "kv_latent_dim"),
            ("kv_a_proj_with_mqa.bias", "kv_down_proj.bias", "kv_latent_dim k_bias"),
            ("kv_a_layernorm.weight", "kv_down_norm.scale", "kv_latent_dim"),
            ("kv_b_proj.weight", "kv_proj.weight", "kv_latent_dim"),
        )
    ]
    return weight_map.extended(rows)


def renamed(weight_map: WeightMap, names: Mapping[str, str]) -> WeightMap:
    """Replace parts of the external names in a weight map.

    Args:
        weight_map: Hugging Face map, each row with one external name.
        names: maps parts of external names to their replacements.
    """

    def rename(external: str) -> str:
        for old, new in names.items():
            external = external.replace(old, new)
        return external

    return replace(weight_map, rows=tuple(replace(row, external=rename(row.external)) for row in weight_map.rows))


def attention_names(theirs: str = "self_attn", output: str = "o_proj") -> list[tuple[str, str]]:
    """Return the names of the linear layers of attention, (ours, theirs)."""
    names = [(f"attn.{name}_proj", f"{theirs}.{name}_proj") for name in "qkv"]
    return [*names, ("attn.output_proj", f"{theirs}.{output}")]


def gated_names(theirs: str = "mlp") -> list[tuple[str, str]]:
    """Return the names of the linear layers of a gated feed-forward layer, (ours, theirs)."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return [(f"mlp.{ours}", f"{theirs}.{name}") for ours, name in names.items()]


def module_rows(
    theirs: str,
    ours: str,
    modules: Iterable[tuple[str, str]],
    kinds: Sequence[str] = ("weight", "bias"),
    when: str = "",
) -> list[Row]:
    """Make the rows of modules.

    Args:
        theirs: prefix of the external names.
        ours: prefix of our names.
        modules: rest of each module's name: (ours, theirs).
        kinds: our names of each module's parameters; the external name of ``scale`` is ``weight``.
        when: see :class:`Row`.
    """
    pairs = [(kind, "weight" if kind == "scale" else kind) for kind in kinds]
    return [Row(f"{theirs}{b}.{y}", f"{ours}{a}.{x}", when=when) for a, b in modules for x, y in pairs]


def _when_bias(where: str, bias: str) -> str:
    # In latent attention, q_bias is the bias of the latent of queries.
    return "attn_layers q_bias !kv_latent_dim" if bias == "q_bias" else f"{where} {bias}"


def _when_norm(ours: str) -> str:
    return "mlp_norm_layers" if ours == "mlp_norm" else "sa_norm_layers" if ours == "sa_norm" else "has_post_norm"


# Hugging Face names of families with rope_layout "interleaved" (Llama, Mistral, SmolLM2).
HF_INTERLEAVED = hf_names(InterleaveRope())
# Hugging Face names of families with rope_layout "half", the layout of Hugging Face (Qwen).
HF_HALF = hf_names(Identity())
# Meta's consolidated files have interleaved queries and keys, like ours, and a copy of a tied output projection.
META = WeightMap(
    _rows(_META, Identity()),
    tied=(Tied("output.weight", "tok_embeddings.weight", write=True),),
    ignore=("rope.freqs",),
)
# As in our weights, llama.cpp interleaves the rows of queries and keys for Llama, but not for Qwen.
GGUF = WeightMap(
    _rows(_GGUF, Identity()),
    tied=(Tied("output.weight", "tok_embeddings.weight"),),
    ignore=("rope_freqs.weight",),
)
