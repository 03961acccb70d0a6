"""LFM2 and LFM2.5, the mixtures of experts.

LFM2's layers, with experts and sigmoid routers after dense first layers. The selection bias of a router is optional.
"""

from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_fields import Fields
from torchtune.models._mixers import ShortConvMixer
from torchtune.models._spec import family
from torchtune.models._weight_map import Row
from torchtune.models._weight_names import HF_HALF, experts, mixers, renamed
from torchtune.models.lfm2 import FORMAT, RENAMED, read_layers, write_layers
from torchtune.models.lfm2 import SIZES as LFM2_SIZES


def _read(fields: Fields) -> dict[str, Any]:
    fields.take("layer_types")  # required: no other field lists the convolution layers
    num_dense_layers = min(fields.take("num_dense_layers", 2), fields.take("num_hidden_layers"))
    return {**read_layers(fields), "expertless_layers": tuple(range(num_dense_layers))}


def _write(d: Description) -> dict[str, Any]:
    return {**write_layers(d), "num_dense_layers": len(d.expertless_layers)}


_FORMAT = replace(
    FORMAT,
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    fixed={"router_scores": "sigmoid", "router_sum_eps": 1e-6},
    extra_fields=(
        ("num_experts", "num_experts", 32),
        ("num_experts_per_tok", "experts_per_token", 4),
        ("moe_intermediate_size", "expert_dim", 1792),
        ("norm_topk_prob", "router_normalize", True),
        ("routed_scaling_factor", "router_scale", 1.0),
        ("use_expert_bias", "router_selection_bias", True),
    ),
    read_more=_read,
    write_more=_write,
    defaults={**FORMAT.defaults, "intermediate_size": 7168},
)
_EXPERTS = experts(renamed(HF_HALF, RENAMED), "feed_forward", "w1", "w3", "w2")
_BIAS = Row(
    "model.layers.{layer}.feed_forward.expert_bias",
    "layers.{layer}.mlp.router.selection_bias",
    when="expert_layers router_selection_bias",
)
SPEC = family("lfm2_moe", _FORMAT, mixers(_EXPERTS.extended([_BIAS]), ShortConvMixer.names))

SIZES = {
    "lfm2_8b_a1b": replace(
        LFM2_SIZES["lfm2_1_2b"],
        num_layers=24,
        intermediate_dim=7168,
        mixer_layers=tuple(layer for layer in range(24) if layer not in (2, 6, 10, 14, 18, 21)),
        num_experts=32,
        experts_per_token=4,
        expert_dim=1792,
        expertless_layers=(0, 1),
        router_scores="sigmoid",
        router_normalize=True,
        router_sum_eps=1e-6,
        router_selection_bias=True,
    ),
}
BUILDERS = model_builders(__name__, "LFM2", SPEC, SIZES)
lfm2_8b_a1b = BUILDERS["lfm2_8b_a1b"]
lora_lfm2_8b_a1b = BUILDERS["lora_lfm2_8b_a1b"]
qlora_lfm2_8b_a1b = BUILDERS["qlora_lfm2_8b_a1b"]

__all__ = ["SPEC", *BUILDERS]
