"""Sizes of Qwen 2."""

from functools import partial

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import QWEN2
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import GGUF, HF_HALF

SPEC = ModelSpec(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    from_hf_config=QWEN2.read,
    to_hf_config=QWEN2.write,
    weight_maps={"hf": HF_HALF, "gguf": GGUF},
    model_types=("QWEN2",),
)

qwen2_size = partial(
    Description,
    vocab_size=151_936,
    max_seq_len=32_768,
    q_bias=True,
    k_bias=True,
    v_bias=True,
    rope_base=1_000_000.0,
    rope_layout="half",
    norm_eps=1e-6,
)

SIZES = {
    "qwen2_0_5b": qwen2_size(
        num_layers=24, embed_dim=896, intermediate_dim=4864, num_heads=14, num_kv_heads=2, tie_word_embeddings=True
    ),
    "qwen2_1_5b": qwen2_size(
        num_layers=28, embed_dim=1536, intermediate_dim=8960, num_heads=12, num_kv_heads=2, tie_word_embeddings=True
    ),
    "qwen2_7b": qwen2_size(
        vocab_size=152_064, num_layers=28, embed_dim=3584, intermediate_dim=18_944, num_heads=28, num_kv_heads=4
    ),
}
BUILDERS = model_builders(__name__, "Qwen2", SPEC, SIZES)
globals().update(BUILDERS)
