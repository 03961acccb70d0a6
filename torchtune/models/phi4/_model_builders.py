"""Size of Phi-4, which has the architecture of Phi-3."""

from dataclasses import replace

from torchtune._lazy import former_names
from torchtune.models._family import model_builders
from torchtune.models.phi3._model_builders import SPEC as PHI3_SPEC
from torchtune.models.phi3._model_builders import phi3_description

SPEC = replace(PHI3_SPEC, name="phi4", model_types=("PHI4", "PHI3_MINI"))

SIZES = {
    "phi4_14b": phi3_description(
        vocab_size=100_352,
        num_layers=40,
        embed_dim=5120,
        intermediate_dim=17_920,
        max_seq_len=16_384,
        num_heads=40,
        num_kv_heads=10,
        rope_base=250_000.0,
    ),
}
BUILDERS = model_builders(__name__, "Phi-4", SPEC, SIZES)

__getattr__ = former_names(__name__)
