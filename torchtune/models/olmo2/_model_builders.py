"""Sizes of OLMo 2."""

from functools import partial

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import hf_names
from torchtune.models._weight_ops import Identity

# Norms of a layer, all post-norms: ours -> Hugging Face's.
NORMS = {"sa_scale": "post_attention_layernorm", "mlp_scale": "post_feedforward_layernorm"}

FORMAT = HFFormat(
    "Olmo2ForCausalLM",
    "olmo2",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    fixed=(("norm_order", "post"), ("qk_norm_whole", True)),
    defaults=(("max_position_embeddings", 2048), ("rms_norm_eps", 1e-5)),
)
SPEC = ModelSpec(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    from_hf_config=FORMAT.read,
    to_hf_config=FORMAT.write,
    weight_maps={"hf": hf_names(Identity(), NORMS)},
)

_olmo2 = partial(
    Description,
    vocab_size=100_352,
    max_seq_len=4096,
    norm_eps=1e-6,
    rope_base=500_000.0,
    rope_layout="half",
    norm_order="post",
    qk_norm="before_rope",
    qk_norm_whole=True,
)

SIZES = {
    "olmo2_1b": _olmo2(num_layers=16, embed_dim=2048, intermediate_dim=8192, num_heads=16, num_kv_heads=16),
    "olmo2_7b": _olmo2(num_layers=32, embed_dim=4096, intermediate_dim=11_008, num_heads=32, num_kv_heads=32),
    "olmo2_13b": _olmo2(num_layers=40, embed_dim=5120, intermediate_dim=13_824, num_heads=40, num_kv_heads=40),
    "olmo2_32b": _olmo2(num_layers=64, embed_dim=5120, intermediate_dim=27_648, num_heads=40, num_kv_heads=8),
}
BUILDERS = model_builders(__name__, "OLMo 2", SPEC, SIZES)
globals().update(BUILDERS)
