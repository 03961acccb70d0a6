"""Weight names that families share: Hugging Face's Llama shape, Meta's files, llama.cpp's GGUF."""

from torchtune.models._weight_map import Row, Tied, WeightMap
from torchtune.models._weight_ops import Identity, InterleaveRope, Op

# Our module inside a layer -> its name in each format, and the description's attribute for its bias and for itself.
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
    ("sa_norm", "input_layernorm", "attention_norm", "attn_norm", None),
    ("mlp_norm", "post_attention_layernorm", "ffn_norm", "ffn_norm", None),
    ("attn.q_norm", "self_attn.q_norm", "attention.q_norm", "attn_q_norm", "has_qk_norm"),
    ("attn.k_norm", "self_attn.k_norm", "attention.k_norm", "attn_k_norm", "has_qk_norm"),
)
# Embeddings, final norm, output: ours, Hugging Face, Meta, GGUF, when
_ENDS = (
    ("tok_embeddings.weight", "model.embed_tokens.weight", "tok_embeddings.weight", "token_embd.weight", None),
    ("norm.scale", "model.norm.weight", "norm.weight", "output_norm.weight", None),
    ("output.weight", "lm_head.weight", "output.weight", "output.weight", "untied"),
)
_HF, _META, _GGUF = 1, 2, 3
_LAYER = {_HF: "model.layers.{layer}.", _META: "layers.{layer}.", _GGUF: "blk.{layer}."}


def _rows(column: int, qk: Op) -> tuple[Row, ...]:
    """Rows of one format; ``qk`` is what happens to the rows of queries and keys."""
    rows = [Row(row[column], row[0], when=row[4]) for row in _ENDS]
    for row in _LINEARS:
        op = qk if row[0] in ("attn.q_proj", "attn.k_proj") else Identity()
        external, ours = _LAYER[column] + row[column], "layers.{layer}." + row[0]
        rows.append(Row(f"{external}.weight", f"{ours}.weight", op))
        rows.append(Row(f"{external}.bias", f"{ours}.bias", op, when=row[4]))
    for row in _NORMS:
        op = qk if row[4] is not None else Identity()
        rows.append(Row(f"{_LAYER[column]}{row[column]}.weight", f"layers.{{layer}}.{row[0]}.scale", op, when=row[4]))
    return tuple(rows)


def _hf(qk: Op) -> WeightMap:
    return WeightMap(
        _rows(_HF, qk),
        tied=(Tied("lm_head.weight", "tok_embeddings.weight"),),
        ignore=("model.layers.{layer}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    )


# Hugging Face names where we keep the channels of a rotation side by side (Llama, Mistral, SmolLM2) …
HF_INTERLEAVED = _hf(InterleaveRope())
# … and where we keep them half a head apart as Hugging Face does (Qwen).
HF_HALF = _hf(Identity())
# Meta's consolidated files hold queries and keys interleaved, as we do, and repeat a shared output matrix.
META = WeightMap(
    _rows(_META, Identity()),
    tied=(Tied("output.weight", "tok_embeddings.weight", write=True),),
    ignore=("rope.freqs",),
)
# llama.cpp interleaves the rows of Llama's queries and keys, and leaves Qwen's as they are: as we do, both times.
GGUF = WeightMap(
    _rows(_GGUF, Identity()),
    tied=(Tied("output.weight", "tok_embeddings.weight"),),
    ignore=("rope_freqs.weight",),
)
