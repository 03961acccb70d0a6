"""Every architecture trains under tensor parallelism as on one device, or is refused with the reason."""

import itertools
import json
from typing import Any

import pytest

from tests.recipes.killing import launch
from tests.torchtune.checkpoints.small import SIZES, build, write_folder
from tests.torchtune.models.families import FAMILIES, NAME_OF_ARCHITECTURE
from torchtune.models import ModelError, get_spec, list_specs, spec_for_architecture
from torchtune.models.llama4 import decoder_only_tp_plan
from torchtune.modules.moe import BalancingLoss, LossFreeBalancing
from torchtune.modules.parallel.tensor_parallel import ParallelError
from torchtune.modules.peft import LoRA
from torchtune.training import ParallelDims
from torchtune.training.parallel import check_parallelizable

_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_PAIR = {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 9}
_SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 4.0, "attention_multiplier": 0.2}
# Architecture -> what its config says beyond the small sizes, so that all that it has matters.
SPLIT: dict[str, dict[str, Any]] = {
    "Ernie4_5": {"use_bias": True},
    "Exaone4": _KINDS,
    "Gemma": {"head_dim": 12},
    "Gemma2": {**_KINDS, **_CAPS, "head_dim": 12, "tie_word_embeddings": False},
    "Gemma3": {**_KINDS, "head_dim": 12, "rope_parameters": _PAIR, "final_logit_softcapping": 3.0},
    "Gemma4": {**_KINDS, "head_dim": 12, "global_head_dim": 16, "attention_k_eq_v": True}
    | {"num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0},
    "Gemma4Unified": {**_KINDS, "head_dim": 12, "global_head_dim": 16},
    "Glm4": {"head_dim": 16},
    "Granite": _SCALES,
    "GraniteMoeHybrid": {
        **_SCALES,
        "shared_intermediate_size": 40,
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 2,
        "position_embedding_type": "rope",
        "mamba_n_heads": 1,
    },
    "HunYuanDenseV1": {"head_dim": 12},
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Ministral3": {"rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3}},
    "Mistral": {"sliding_window": 7},
    "Olmo2": {"attention_bias": True},
    "Olmo3": {**_KINDS, "rope_parameters": _PAIR},
    "Phi3": {"sliding_window": 7},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "SeedOss": {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "SmolLM3": {"no_rope_layers": [1, 0]},
}
_FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LATENTS = {"n_routed_experts": 4, **_FEW_EXPERTS, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
_LATENTS |= {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14}
# Architectures of which a rank computes some layers with its part of the sequence.
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "DeepseekV3": {**_LATENTS, "first_k_dense_replace": 0},
    "Llama4": {"num_local_experts": 2},
    "Glm4MoeLite": {**_LATENTS, "mlp_layer_types": ["sparse", "dense"]},
    "Mistral4": _LATENTS,
    "Glm4Moe": {"n_routed_experts": 4, **_FEW_EXPERTS, "first_k_dense_replace": 0},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Lfm2Moe": {"layer_types": ["full_attention", "conv"], "num_experts": 4, **_FEW_EXPERTS} | {"num_dense_layers": 0},
    "MiniMaxM2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}
_SHARED_EXPERT = {"num_experts": 4, **_FEW_EXPERTS, "shared_expert_intermediate_size": 20}
_DELTA_NET = {"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.08}
_DELTA_NET |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "head_dim": 16}
_DELTA_NET |= {"linear_value_head_dim": 8}
WITH_MIXERS: dict[str, dict[str, Any]] = {
    "NemotronH": {"layers_block_type": ["mamba", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2},
    "FalconH1": {"mamba_n_heads": 4, "mamba_d_ssm": 32},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "mamba"], "num_local_experts": 0, "mamba_n_heads": 4},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {**_DELTA_NET, "mlp_only_layers": [0], **_SHARED_EXPERT},
    "Qwen3_5": _DELTA_NET,
    "Qwen3_5Moe": {**_DELTA_NET, **_SHARED_EXPERT},
}
# An architecture without an entry above is split as the small model of the tests of its family.
for _architecture, _name in NAME_OF_ARCHITECTURE.items():
    if _architecture not in {*SPLIT, *WITH_EXPERTS, *WITH_MIXERS}:
        _options = FAMILIES[_name][1]
        _config = {**SIZES, **_options, "architectures": [f"{_architecture}ForCausalLM"]}
        _description = spec_for_architecture(f"{_architecture}ForCausalLM").from_hf_config(_config)
        if _description.num_experts:
            WITH_EXPERTS[_architecture] = _options
        elif _description.mixer_layers:
            WITH_MIXERS[_architecture] = _options
        else:
            SPLIT[_architecture] = _options
WAYS = {"full": {}, "lora": {"adapter": "lora"}, "dora": {"adapter": "dora"}, "by sequence": {}}
# DoRA's magnitudes scale everything but the biases, which this Llama has.
TRAINED = [("Llama", "dora"), *itertools.product(SPLIT, ("full", "lora"))]
TRAINED += [(name, "by sequence") for name in (*WITH_EXPERTS, *WITH_MIXERS)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Largest relative differences to one process, in a step of two processes, of the rows that are tried."""
    folder = tmp_path_factory.mktemp("families")
    cases = {}
    for item in request.session.items:
        if item.path == request.path and "outcomes" in item.fixturenames:
            name, way = item.callspec.params["name"], item.callspec.params["way"]
            by_sequence = way == "by sequence"
            source = f"{name} {way}" if by_sequence else name
            if not (folder / source).exists():
                options = {**WITH_EXPERTS, **WITH_MIXERS}[name] if by_sequence else SPLIT[name]
                write_folder(folder / source, (name, options), num_hidden_layers=2)
            cases[f"{name} {way}"] = ({"tp": 2}, {**WAYS[way], "source": source, "steps": 1}, {})
    (folder / "cases_2.json").write_text(json.dumps(cases))
    launch("training.parallel.worker", 2, folder)
    return json.loads((folder / "outcomes_2.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), TRAINED)
def test_a_split_layer_computes_what_one_device_does(outcomes, name, way):
    outcome = outcomes[f"{name} {way}"]
    assert outcome["loss"] < 1e-5
    assert outcome["norm"] < 1e-4
    assert outcome["gradient"] < 2e-4  # of the largest element of a tensor
    assert outcome["missing"] == 0


@pytest.mark.parametrize("balancing", [BalancingLoss(), LossFreeBalancing(rate=0.01)])
def test_tensor_parallel_experts_with_balancing_are_refused(tmp_path, balancing):
    shape = "qwen3_moe" if isinstance(balancing, BalancingLoss) else ("Glm4Moe", WITH_EXPERTS["Glm4Moe"])
    model = build(write_folder(tmp_path, shape), balancing)
    with pytest.raises(ParallelError, match=f"{type(balancing).__name__} counts the tokens of whole sequences"):
        check_parallelizable(model, ParallelDims(tp=2, world_size=2))


def test_the_plan_that_configs_of_llama4_name_is_that_of_its_dense_layers(tmp_path):
    dense = build(write_folder(tmp_path, num_hidden_layers=1))
    assert decoder_only_tp_plan(dense).keys() == dense.spec.parallel_plan(dense).keys()
    with pytest.raises(ModelError, match="tensor_parallel_plan: inference=True is not"):
        decoder_only_tp_plan(dense, inference=True)


def test_keys_of_other_layers_and_dropout_of_adapters_are_refused(tmp_path):
    model = build(write_folder(tmp_path / "keys", "gemma4_shared_keys"))
    with pytest.raises(ParallelError, match="tensor_parallel_dim: a model whose layers embed tokens or share keys"):
        model.spec.parallel_plan(model)
    model = build(write_folder(tmp_path / "dropout"), LoRA(4, 8, dropout=0.1, use_dora=True))
    with pytest.raises(ParallelError, match="set lora_dropout to 0"):
        check_parallelizable(model, ParallelDims(tp=2, world_size=2))


def test_every_architecture_of_a_text_model_is_tried():
    known_architectures = set()
    for spec_name in list_specs():
        for name in get_spec(spec_name).architectures:
            known_architectures.add(name.removesuffix("ForCausalLM"))
    # Models with images are not split: tests/recipes/test_vision.py, tests/recipes/test_image_text.py.
    images = {name for name in known_architectures if name.endswith("ForConditionalGeneration")}
    assert {*SPLIT, *WITH_EXPERTS, *WITH_MIXERS} == known_architectures - {"Gemma3Text", *images}
