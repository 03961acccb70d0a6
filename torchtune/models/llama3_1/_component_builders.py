"""Component builders of Llama 3.1."""

from torchtune.models._builders import component_builders, llama3_scaled
from torchtune.models.llama3_1._model_builders import SPEC

llama3_1, lora_llama3_1 = component_builders(
    "llama3_1",
    __name__,
    "Llama 3.1",
    SPEC,
    llama3_scaled,
    "vocab_size num_layers num_heads num_kv_heads embed_dim max_seq_len",
    attn_dropout=0.0,
    rope_base=500_000,
    intermediate_dim=None,
    norm_eps=1e-5,
    scale_factor=8,
)
