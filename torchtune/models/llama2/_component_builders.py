"""Component builders of Llama 2."""

from torchtune.models._builders import component_builders
from torchtune.models._classifiers import classifier_builder
from torchtune.models._description import Description
from torchtune.models.llama2._model_builders import SPEC

llama2, lora_llama2 = component_builders(
    "llama2",
    __name__,
    "Llama 2",
    SPEC,
    Description,
    "vocab_size num_layers num_heads num_kv_heads embed_dim max_seq_len",
    attn_dropout=0.0,
    intermediate_dim=None,
    norm_eps=1e-5,
    rope_base=10_000.0,
)
llama2_classifier = classifier_builder(llama2, "llama2_classifier", __name__)
lora_llama2_classifier = classifier_builder(lora_llama2, "lora_llama2_classifier", __name__)
