"""Component builder of SmolLM 2."""

from torchtune.models._builders import component_builders, llama3_scaled
from torchtune.models.smol._model_builders import SPEC

smollm2, _ = component_builders(
    "smollm2",
    __name__,
    "SmolLM 2",
    SPEC,
    llama3_scaled,
    "num_layers num_heads num_kv_heads embed_dim intermediate_dim",
    max_seq_len=8192,
    vocab_size=49_152,
    attn_dropout=0.0,
    rope_base=100_000,
    norm_eps=1e-5,
    scale_factor=None,
    tie_word_embeddings=True,
)
