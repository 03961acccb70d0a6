"""The table of families that are compared with transformers: a new family adds a row."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from tests.torchtune.checkpoints.small import random_hf_model
from torchtune.models import from_hf_config
from torchtune.modules import TransformerDecoder

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]


def _base(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "hidden_size": 96,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.05, 1.1, 1.3, 1.9, 2.0],
        "long_factor": [1.0, 1.2, 2.5, 5.0, 9.0, 30.0],
    },
}
_DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "initializer_range": 0.08,  # larger weights make the recurrence magnify rounding
}
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 3,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.1,
}
_GEMMA4_TWO = {**_GEMMA4, "num_hidden_layers": 2, "layer_types": _GEMMA4["layer_types"][:2]}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.2,
}
_GRANITE4 = {**_GRANITE, "shared_intermediate_size": 56, "num_local_experts": 0}
_MAMBA = {"mamba_n_heads": 12, "mamba_n_groups": 2, "mamba_d_state": 6, "initializer_range": 0.1}
_SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_LATENTS = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
_MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.2}
# name -> (architecture of transformers, what its config says beyond the small sizes)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "rope_parameters": _base(500_000.0)},
    ),
    "llama3_2": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama3_dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}}),
    "mistral": ("Mistral", {"sliding_window": 11, "head_dim": 12}),
    "gemma": ("Gemma", {"head_dim": 12, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 12, "sliding_window": 16, "query_pre_attn_scalar": 9}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            "layer_types": _WINDOWS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
                "sliding_attention": _base(10_000.0),
            },
        },
    ),
    "gemma4": ("Gemma4", _GEMMA4_TWO),
    "gemma4_unified": ("Gemma4Unified", _GEMMA4_TWO),
    "gemma4_experts": (
        "Gemma4",
        {**_GEMMA4_TWO, "enable_moe_block": True} | {"num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "gemma4_shared_keys": (
        "Gemma4",
        {**_GEMMA4, "attention_k_eq_v": False, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 97},
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 6, "sliding_window": 13}),
    "phi_partial": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}},
    ),
    "phi4_mini": ("Phi3", {**_LONGROPE, "tie_word_embeddings": True}),
    "phi4_mini_long": (
        "Phi3",
        {
            **_LONGROPE,
            "original_max_position_embeddings": 4,
            "rope_parameters": {**_LONGROPE["rope_parameters"], "attention_factor": 1.1},
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 9,
            "layer_types": _WINDOWS,
            "rope_parameters": {
                "full_attention": {**_YARN, "rope_theta": 500_000.0},
                "sliding_attention": _base(500_000.0),
            },
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "smol3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "granite": ("Granite", {**_GRANITE, "tie_word_embeddings": True}),
    "granite4": (
        "GraniteMoeHybrid",
        {**_GRANITE4, "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope", "mamba_n_heads": 1},
    ),
    "granite4_h": (
        "GraniteMoeHybrid",
        {
            **_GRANITE4,
            **_MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **_MAMBA,
            "mamba_d_ssm": 36,
            "embedding_multiplier": 5.6,
            "lm_head_multiplier": 0.4,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 0.5,  # a power of two: exported within another factor, bit by bit
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 2.0,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 0.5, 1.2, 1.1, 0.6],
            "mlp_multipliers": [0.9, 0.6],
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 6,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 16,
            "routed_scaling_factor": 1.5,
            "n_group": 3,
            "topk_group": 2,
            "initializer_range": 0.1,
        },
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.3,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 9, "layer_types": _WINDOWS},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"head_dim": 16, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "olmoe": ("Olmoe", {"intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_5": ("Qwen3_5", {**_DELTA_NET, "linear_value_head_dim": 12}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_DELTA_NET, **_SHARED_EXPERT, "num_experts_per_tok": 6}),
    "qwen3_next": ("Qwen3Next", {**_DELTA_NET, **_SHARED_EXPERT, "mlp_only_layers": [1]}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 7,
            "floor_scale": 9,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**_LATENTS, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}),
    "deepseek_v3_direct": (  # queries without a latent, values wider than keys, no groups
        "DeepseekV3",
        {**_LATENTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "q_lora_rank": None, "v_head_dim": 28}
        | {"rope_interleave": False, "attention_bias": True, "rope_parameters": {**_YARN, **_MSCALES}},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**_LATENTS, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "mistral4": (
        "Mistral4",
        {**_LATENTS, "first_k_dense_replace": 0}
        | {
            "rope_parameters": {**_YARN, **_MSCALES, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}
        },
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16, "tie_word_embeddings": True},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "tie_word_embeddings": True}
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 12}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 10,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
    ),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}

# One row of each architecture: what is the same for all of them need not be seen of more.
ARCHITECTURES = list({architecture: name for name, (architecture, _) in FAMILIES.items()}.values())
# Rows that are also compared as classifiers: one for each architecture that transformers has them for.
CLASSIFIERS = list(
    {
        architecture: name
        for name, (architecture, _) in FAMILIES.items()
        if f"{architecture}ForSequenceClassification" in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    }.values()
)


@dataclass
class Pair:
    """The same random model twice, and the folder through which it went."""

    name: str
    hf: torch.nn.Module
    folder: Path
    model: TransformerDecoder


def load_model(folder: Path) -> TransformerDecoder:
    """Our model from a Hugging Face folder, in float32."""
    with torch.device("meta"):
        model = from_hf_config(folder)
    model.to_empty(device="cpu")
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict(dict(model.spec.weight_map("hf").to_tune(weights.items(), model.description)))
    return model.eval()


def write_model(model: TransformerDecoder, folder: Path) -> dict[str, torch.Tensor]:
    """Our model as a Hugging Face folder; returns what was written."""
    weights = dict(model.spec.weight_map("hf").to_external(model.state_dict().items(), model.description))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.spec.to_hf_config(model.description)
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": 0}))
    return weights


_EXPERT = ("gate_proj", "up_proj", "down_proj")
# Whose files hold the experts of a layer together.
_FUSED = ("mistral4", "Mistral4", "llama4", "Llama4")
# Whose files call the matrices of experts as Mixtral's do.
_OF_MIXTRAL = ("mixtral", "Mixtral", "minimax_m2", "MiniMaxM2", "lfm2_moe", "Lfm2Moe")


def _of_granite4(name: str) -> str:
    for ours, theirs in (
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".router.weight", ".router.layer.weight"),
    ):
        name = name.replace(f"block_sparse_moe{ours}", f"block_sparse_moe{theirs}")
    return name


def on_disk(tensors: Iterable[tuple[str, torch.Tensor]], of: str = "") -> dict[str, torch.Tensor]:
    """Tensors of a model of transformers, ``of`` a row or an architecture, under the names of its files."""
    gate, up, down, block = ("w1", "w3", "w2", "block_sparse_moe") if of in _OF_MIXTRAL else (*_EXPERT, "mlp")
    found = {}
    tensors = [(_of_granite4(name), tensor) for name, tensor in tensors]
    if any(".mixer." in name for name, _ in tensors):  # of Nemotron
        tensors = [(name.replace("model.", "backbone."), tensor) for name, tensor in tensors]
    names = {name for name, _ in tensors}
    for key, tensor in tensors:
        name = key.replace(".mlp.", f".{block}.")
        path, _, leaf = name.rpartition(".")
        is_mlp = ".mlp." in key or ".feed_forward." in key
        if ".mixer.experts." in key:
            found |= {f"{path}.{expert}.{leaf}.weight": matrix for expert, matrix in enumerate(tensor)}
            continue
        if f"{path}.gate_up_proj_bias" in names or not is_mlp or of in _FUSED:  # and gpt-oss, Gemma
            found[key] = tensor
        elif leaf == "gate_up_proj" and tensor.dim() == 3:
            for expert, matrix in enumerate(tensor):
                found[f"{path}.{expert}.{gate}.weight"], found[f"{path}.{expert}.{up}.weight"] = matrix.chunk(2)
        elif leaf == "down_proj" and tensor.dim() == 3:
            found |= {f"{path}.{expert}.{down}.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def make_hf_model(name: str, task: str = "ForCausalLM", **more: Any) -> torch.nn.Module:
    """A small random model of transformers, of a row; ``more`` goes into its config."""
    architecture, options = FAMILIES[name]
    return random_hf_model(architecture, {**_SMALL, **options, **more}, task)


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One row of the table, as models."""
    folder = tmp_path_factory.mktemp(request.param)
    hf = make_hf_model(request.param)
    hf.save_pretrained(folder)
    return Pair(request.param, hf, folder, load_model(folder))


@pytest.fixture
def save_model() -> Callable[[TransformerDecoder, Path], dict[str, torch.Tensor]]:
    """:func:`write_model`."""
    return write_model
