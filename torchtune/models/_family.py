"""Building blocks of a family's module: description, config format, weight names and builders."""

# ruff: noqa: F401 - families import these names from here
from collections.abc import Mapping
from typing import Any

from torchtune.models._builders import Builder, component_builders, llama3_scaled, model_builders
from torchtune.models._description import Description, ModelError
from torchtune.models._hf_config import LLAMA, MISTRAL, QWEN2, QWEN3, HFFormat
from torchtune.models._hf_fields import (
    Fields,
    all_but_every,
    format_value,
    is_number,
    layers_of_type,
    write_layer_types,
)
from torchtune.models._hf_layers import (
    FUSED_DELTA_NET,
    read_delta_net,
    read_experts,
    read_latents,
    read_mamba,
    read_qwen_experts,
    read_unrotated_layers,
    require_silu,
    router_fields,
    write_delta_net,
    write_experts,
    write_latents,
    write_mamba,
    write_qwen_experts,
    write_unrotated_layers,
)
from torchtune.models._hf_rope import write_growth, write_scaling
from torchtune.models._mixers import DeltaNetMixer, Mamba2Mixer, ShortConvMixer
from torchtune.models._rope_scaling import (
    LinearRopeScaling,
    Llama3RopeScaling,
    ProportionalRopeScaling,
    YarnRopeScaling,
)
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_map import Row, WeightMap
from torchtune.models._weight_names import (
    GGUF,
    HF_HALF,
    HF_INTERLEAVED,
    META,
    attention_names,
    experts,
    gated_names,
    hf_names,
    latent_attention,
    mixers,
    module_rows,
    renamed,
    shared_expert,
    with_fused_experts,
)
from torchtune.models._weight_ops import (
    FlatPatches,
    FusedExperts,
    Identity,
    InterleaveRope,
    Split,
    Stack,
    SwappedAxes,
)


def family(
    name: str,
    hf_format: HFFormat,
    names: WeightMap,
    *,
    formats: Mapping[str, WeightMap] | None = None,
    **attributes: Any,
) -> ModelSpec:
    """Make the specification of a family.

    Args:
        name: name in the registry, equal to the name of the module.
        hf_format: reads and writes the ``config.json`` of the family.
        names: weight names of Hugging Face's files.
        formats: weight names of other formats.
        **attributes: further attributes of the :class:`ModelSpec`, or replacements of the above.
    """
    values = {
        "architectures": (hf_format.architecture,),
        "from_hf_config": hf_format.read,
        "to_hf_config": hf_format.write,
        "weight_maps": {"hf": names, **(formats or {})},
    }
    return ModelSpec(name=name, **{**values, **attributes})
