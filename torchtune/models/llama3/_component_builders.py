"""Component builders of Llama 3."""

from torchtune.models._builders import component_builders
from torchtune.models._description import Description
from torchtune.models.llama3._model_builders import SPEC

llama3, lora_llama3 = component_builders(
    "llama3",
    __name__,
    "Llama 3",
    SPEC,
    Description,
    "vocab_size num_layers num_heads num_kv_heads embed_dim max_seq_len",
    attn_dropout=0.0,
    rope_base=500_000,
    intermediate_dim=None,
    norm_eps=1e-5,
)
