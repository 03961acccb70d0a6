"""Tables of weight names, and conversions that checkpointers copied from earlier releases import."""

from collections.abc import Callable
from typing import Any

from torchtune.checkpoints import CheckpointError

# Name in files -> name in models, with {} for the layer. Weight maps (torchtune.models.WeightMap) replace these tables:
# changing a table does not change what a checkpointer does.
_FROM_HF = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attn.q_proj.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attn.k_proj.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attn.v_proj.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attn.output_proj.weight",
    "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.mlp.w1.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.mlp.w3.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.mlp.w2.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.sa_norm.scale",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.mlp_norm.scale",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "output.weight",
}
_META_MODULES = {
    "attention.wq": "attn.q_proj",
    "attention.wk": "attn.k_proj",
    "attention.wv": "attn.v_proj",
    "attention.wo": "attn.output_proj",
}
_FROM_META = {
    "tok_embeddings.weight": "tok_embeddings.weight",
    "norm.weight": "norm.scale",
    "output.weight": "output.weight",
    **{f"layers.{{}}.{theirs}.weight": f"layers.{{}}.{ours}.weight" for theirs, ours in _META_MODULES.items()},
    "layers.{}.attention_norm.weight": "layers.{}.sa_norm.scale",
    "layers.{}.ffn_norm.weight": "layers.{}.mlp_norm.scale",
    **{f"layers.{{}}.feed_forward.{name}.weight": f"layers.{{}}.mlp.{name}.weight" for name in ("w1", "w2", "w3")},
    **{
        f"layers.{{}}.{theirs}.{part}.weight": f"layers.{{}}.{ours}.{part}.weight"
        for theirs, ours in _META_MODULES.items()
        for part in ("lora_a", "lora_b")
    },
}
_TO_PEFT_KEYS = {"lora_a": "lora_A", "lora_b": "lora_B", "magnitude": "lora_magnitude_vector"}


def _unavailable(name: str) -> Callable[..., Any]:
    """Return a function that says what converts the weights instead: copied checkpointers import it for any model."""

    def convert(*args: Any, **kwargs: Any) -> Any:
        raise CheckpointError(
            f"{name} is not part of this library: torchtune.training.FullModelHFCheckpointer and "
            "FullModelMetaCheckpointer read and write all models."
        )

    convert.__name__ = name
    return convert


llama3_vision_hf_to_tune = _unavailable("llama3_vision_hf_to_tune")
llama3_vision_tune_to_hf = _unavailable("llama3_vision_tune_to_hf")
llama3_vision_meta_to_tune = _unavailable("llama3_vision_meta_to_tune")
llama3_vision_tune_to_meta = _unavailable("llama3_vision_tune_to_meta")
llama4_hf_to_tune = _unavailable("llama4_hf_to_tune")
llama4_tune_to_hf = _unavailable("llama4_tune_to_hf")
llama4_meta_to_tune = _unavailable("llama4_meta_to_tune")
llama4_tune_to_meta = _unavailable("llama4_tune_to_meta")
clip_text_hf_to_tune = _unavailable("clip_text_hf_to_tune")
t5_encoder_hf_to_tune = _unavailable("t5_encoder_hf_to_tune")
