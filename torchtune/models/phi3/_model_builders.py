"""Sizes of Phi-3."""

from functools import partial

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import hf_names
from torchtune.models._weight_ops import Identity

FORMAT = HFFormat(
    "Phi3ForCausalLM",
    "phi3",
    "half",
    windows="sliding_window",
    ropes=("partial",),
    defaults=(
        ("attention_bias", None),
        ("embd_pdrop", None),
        ("max_position_embeddings", 4096),
        ("original_max_position_embeddings", 4096),
        ("rms_norm_eps", 1e-5),
    ),
)
SPEC = ModelSpec(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    from_hf_config=FORMAT.read,
    to_hf_config=FORMAT.write,
    weight_maps={"hf": hf_names(Identity(), fused=("qkv", "gate_up"))},
    model_types=("PHI3_MINI", "PHI4"),
)

phi3_description = partial(Description, rope_layout="half")

SIZES = {
    "phi3_mini": phi3_description(
        vocab_size=32_064,
        num_layers=32,
        embed_dim=3072,
        intermediate_dim=8192,
        max_seq_len=4096,
        num_heads=32,
        num_kv_heads=32,
        window=2047,
        window_layers=tuple(range(32)),
    ),
}
BUILDERS = model_builders(__name__, "Phi-3", SPEC, SIZES)
globals().update(BUILDERS)
