"""Component builders of Mistral."""

from torchtune.models._builders import component_builders
from torchtune.models._classifiers import classifier_builder
from torchtune.models._description import Description
from torchtune.models.mistral._model_builders import SPEC

mistral, lora_mistral = component_builders(
    "mistral",
    __name__,
    "Mistral",
    SPEC,
    Description,
    "vocab_size num_layers num_heads num_kv_heads embed_dim intermediate_dim max_seq_len",
    attn_dropout=0.0,
    norm_eps=1e-5,
    rope_base=10_000,
)
mistral_classifier = classifier_builder(mistral, "mistral_classifier", __name__)
lora_mistral_classifier = classifier_builder(lora_mistral, "lora_mistral_classifier", __name__)
