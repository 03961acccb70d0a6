"""Component builders of Phi-3."""

from torchtune.models._builders import component_builders
from torchtune.models.phi3._model_builders import SPEC, phi3_description

phi3, lora_phi3 = component_builders(
    "phi3",
    __name__,
    "Phi-3",
    SPEC,
    phi3_description,
    "vocab_size num_layers num_heads num_kv_heads embed_dim intermediate_dim max_seq_len",
    attn_dropout=0.0,
    norm_eps=1e-5,
    rope_base=10_000,
)
