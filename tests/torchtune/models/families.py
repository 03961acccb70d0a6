"""What tests know about each family. A new family adds a row to ``FAMILIES`` and its sizes to ``PUBLISHED``.

``FAMILIES`` are small models that are compared with ``transformers``: logits, gradients, adapters, files, absent
fields and tensor parallelism.

``PUBLISHED`` are the ``config.json`` of published models, in their own words: the numbers that the builders have to
repeat. They are written down from the files on the Hugging Face Hub, not from the builders. Fields that equal the
default of ``transformers``' config class may be missing.
"""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

# Sizes of every row of FAMILIES.
SMALL = {
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


_SMALL_LLAMA3_ROPE = {
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
_SMALL_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.2,
}
_GRANITE4 = {**_SMALL_GRANITE, "shared_intermediate_size": 56, "num_local_experts": 0}
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
    "llama3_2": ("Llama", {"rope_parameters": _SMALL_LLAMA3_ROPE, "tie_word_embeddings": True}),
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
    "granite": ("Granite", {**_SMALL_GRANITE, "tie_word_embeddings": True}),
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
            "rope_parameters": _SMALL_LLAMA3_ROPE,
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

# One row of each architecture, the last one: what is the same for all of them need not be seen of more. A new row of an
# architecture stands before those that it has.
NAME_OF_ARCHITECTURE = {architecture: name for name, (architecture, _) in FAMILIES.items()}
ARCHITECTURES = list(NAME_OF_ARCHITECTURE.values())
# Rows that are also compared as classifiers: one for each architecture that transformers has them for.
CLASSIFIERS = list(
    {
        architecture: name
        for name, (architecture, _) in FAMILIES.items()
        if f"{architecture}ForSequenceClassification" in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    }.values()
)


Config = dict[str, Any]


def _sizes(
    vocab: int, width: int, ffn: int, layers: int, heads: int, kv_heads: int, length: int, eps: float, theta: float
) -> Config:
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": eps,
        "rope_theta": theta,
    }


# Architectures with another name for the eps of norms.
_EPS = {"NemotronH": "layer_norm_epsilon", "Lfm2": "norm_eps", "Lfm2Moe": "norm_eps"}


def _of(architecture: str, sizes: Config, tied: bool = False, **more: Any) -> Config:
    sizes = dict(sizes)
    if architecture in _EPS and "rms_norm_eps" in sizes:  # the field has another name
        sizes[_EPS[architecture]] = sizes.pop("rms_norm_eps")
    return {"architectures": [f"{architecture}ForCausalLM"], "tie_word_embeddings": tied, **sizes, **more}


def _kinds(layers: int, full: int, first: str = "sliding_attention") -> list[str]:
    """``layer_types`` with full attention in every ``full``-th layer."""
    layer_types = [first] * layers
    for layer in range(full - 1, layers, full):
        layer_types[layer] = "full_attention"
    return layer_types


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_2_ROPE = {**_LLAMA3_ROPE, "factor": 32.0}
_GEMMA = {"tied": True}
_GEMMA2 = {"tied": True}
_GEMMA3 = {"sliding_window": 1024, "sliding_window_pattern": 6, "tied": True}
_LINEAR_8 = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_GPT_OSS = {"router_aux_loss_coef": 0.9}
_GRANITE = {"tied": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
_GRANITE_H = {
    **_GRANITE,
    "position_embedding_type": "nope",
    "mamba_d_state": 128,
    "layer_types": [*["mamba"] * 5, *["attention", *["mamba"] * 9] * 3, "attention", *["mamba"] * 4],
}
_MINISTRAL3 = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_OLMO3 = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
    },
}
_QWEN3 = {"head_dim": 128}
_QWEN3_MOE = {**_QWEN3, "norm_topk_prob": True}
_GLM4_MOE = {"head_dim": 128, "attention_bias": True}
_DEEPSEEK = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_LFM2 = {"tied": True}
_LFM2_AT = {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}

_LLAMA2_7B = _sizes(32_000, 4096, 11_008, 32, 32, 32, 4096, 1e-5, 10_000.0)
_LLAMA3_8B = _sizes(128_256, 4096, 14_336, 32, 32, 8, 8192, 1e-5, 500_000.0)
_MISTRAL_7B = _sizes(32_000, 4096, 14_336, 32, 32, 8, 32_768, 1e-5, 10_000.0)


def _qwen2(width: int, ffn: int, layers: int, heads: int, kv: int, *, long: bool = False, eps: float = 1e-6) -> Config:
    tied = width <= 2048
    vocab = 151_936 if width <= 2048 else 152_064
    length = 131_072 if long else 32_768
    return _of("Qwen2", _sizes(vocab, width, ffn, layers, heads, kv, length, eps, 1e6), tied)


def _qwen3(width: int, ffn: int, layers: int, heads: int, *, base: bool = False) -> Config:
    sizes = _sizes(151_936, width, ffn, layers, heads, 8, 32_768 if base else 40_960, 1e-6, 1e6)
    return _of("Qwen3", sizes, width <= 2560, **_QWEN3)


def _qwen3_moe(width: int, ffn: int, expert: int, layers: int, heads: int, *, base: bool = False) -> Config:
    sizes = _sizes(151_936, width, ffn, layers, heads, 4, 32_768 if base else 40_960, 1e-6, 1e6)
    return _of("Qwen3Moe", sizes, **_QWEN3_MOE, moe_intermediate_size=expert)


# builder -> its config.json
PUBLISHED: dict[str, Config] = {
    "gemma_2b": _of("Gemma", _sizes(256_000, 2048, 16_384, 18, 8, 1, 8192, 1e-6, 1e4), **_GEMMA),
    "gemma_7b": _of("Gemma", _sizes(256_000, 3072, 24_576, 28, 16, 16, 8192, 1e-6, 1e4), **_GEMMA),
    "gemma2_2b": _of("Gemma2", _sizes(256_000, 2304, 9216, 26, 8, 4, 8192, 1e-6, 1e4), **_GEMMA2),
    "gemma2_9b": _of("Gemma2", _sizes(256_000, 3584, 14_336, 42, 16, 8, 8192, 1e-6, 1e4), **_GEMMA2),
    "gemma2_27b": _of("Gemma2", _sizes(256_000, 4608, 36_864, 46, 32, 16, 8192, 1e-6, 1e4), **_GEMMA2)
    | {"head_dim": 128, "query_pre_attn_scalar": 144},
    "gemma3_1b": _of("Gemma3", _sizes(262_144, 1152, 6912, 26, 4, 1, 32_768, 1e-6, 1e6), **_GEMMA3)
    | {"sliding_window": 512},
    "gemma3_4b": _of("Gemma3", _sizes(262_208, 2560, 10_240, 34, 8, 4, 131_072, 1e-6, 1e6), **_GEMMA3) | _LINEAR_8,
    "gemma3_12b": _of("Gemma3", _sizes(262_208, 3840, 15_360, 48, 16, 8, 131_072, 1e-6, 1e6), **_GEMMA3) | _LINEAR_8,
    "gemma3_27b": _of("Gemma3", _sizes(262_208, 5376, 21_504, 62, 32, 16, 131_072, 1e-6, 1e6), **_GEMMA3)
    | {**_LINEAR_8, "head_dim": 128, "query_pre_attn_scalar": 168},
    "phi3_mini": _of("Phi3", _sizes(32_064, 3072, 8192, 32, 32, 32, 4096, 1e-5, 1e4), sliding_window=2047),
    "phi4_14b": _of("Phi3", _sizes(100_352, 5120, 17_920, 40, 40, 10, 16_384, 1e-5, 250_000.0)),
    "olmo2_1b": _of("Olmo2", _sizes(100_352, 2048, 8192, 16, 16, 16, 4096, 1e-6, 5e5)),
    "olmo3_7b": _of("Olmo3", _sizes(100_278, 4096, 11_008, 32, 32, 32, 65_536, 1e-6, 5e5), **_OLMO3),
    "olmo3_32b": _of("Olmo3", _sizes(100_278, 5120, 27_648, 64, 40, 8, 65_536, 1e-6, 5e5), **_OLMO3),
    "smollm3_3b": _of("SmolLM3", _sizes(128_256, 2048, 11_008, 36, 16, 4, 65_536, 1e-6, 5e6), True),
    "gpt_oss_20b": _of("GptOss", _sizes(201_088, 2880, 2880, 24, 64, 8, 131_072, 1e-5, 150_000.0), **_GPT_OSS)
    | {"num_local_experts": 32},
    "gpt_oss_120b": _of("GptOss", _sizes(201_088, 2880, 2880, 36, 64, 8, 131_072, 1e-5, 150_000.0), **_GPT_OSS),
    "granite3_1_2b": _of("Granite", _sizes(49_155, 2048, 8192, 40, 32, 8, 131_072, 1e-5, 5e6), **_GRANITE)
    | {"logits_scaling": 8.0, "attention_multiplier": 0.015625},
    "granite3_1_8b": _of("Granite", _sizes(49_155, 4096, 12_800, 40, 32, 8, 131_072, 1e-5, 1e7), **_GRANITE)
    | {"logits_scaling": 16.0, "attention_multiplier": 0.0078125},
    "granite4_micro": _of("GraniteMoeHybrid", _sizes(100_352, 2560, 8192, 40, 40, 8, 131_072, 1e-5, 1e7), **_GRANITE)
    | {"logits_scaling": 10.0, "attention_multiplier": 0.015625, "shared_intermediate_size": 8192}
    | {"num_local_experts": 0, "position_embedding_type": "rope", "layer_types": ["attention"] * 40},
    "granite4_h_micro": _of(
        "GraniteMoeHybrid", _sizes(100_352, 2048, 8192, 40, 32, 8, 131_072, 1e-5, 1e4), **_GRANITE_H
    )
    | {"mamba_n_heads": 64, "shared_intermediate_size": 8192, "num_local_experts": 0}
    | {"logits_scaling": 8.0, "attention_multiplier": 0.015625},
    "granite4_h_tiny": _of("GraniteMoeHybrid", _sizes(100_352, 1536, 512, 40, 12, 4, 131_072, 1e-5, 1e4), **_GRANITE_H)
    | {"mamba_n_heads": 48, "num_local_experts": 64}
    | {"logits_scaling": 6.0, "attention_multiplier": 0.0078125, "num_experts_per_tok": 6},
    "granite4_h_small": _of("GraniteMoeHybrid", _sizes(100_352, 4096, 768, 40, 32, 8, 131_072, 1e-5, 1e4), **_GRANITE_H)
    | {"shared_intermediate_size": 1536, "num_local_experts": 72}
    | {"logits_scaling": 16.0, "attention_multiplier": 0.0078125, "num_experts_per_tok": 10},
    "nemotron3_nano_30b_a3b": _of("NemotronH", _sizes(131_072, 2688, 1856, 52, 32, 2, 262_144, 1e-5, 1e4))
    | {
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
    },
    "ernie4_5_0_3b": _of("Ernie4_5", _sizes(103_424, 1024, 3072, 18, 16, 2, 131_072, 1e-5, 5e5), True, head_dim=128),
    "ministral3_3b": _of("Ministral3", _sizes(131_072, 3072, 9216, 26, 32, 8, 262_144, 1e-5, 1e6), True, **_MINISTRAL3),
    "ministral3_8b": _of("Ministral3", _sizes(131_072, 4096, 14_336, 34, 32, 8, 262_144, 1e-5, 1e6), **_MINISTRAL3),
    "exaone4_1_2b": _of("Exaone4", _sizes(102_400, 2048, 4096, 30, 32, 8, 65_536, 1e-5, 1e6), True, head_dim=64)
    | {"sliding_window": None, "layer_types": ["full_attention"] * 30}
    | {"rope_scaling": {**_LLAMA3_ROPE, "factor": 16.0}},
    "exaone4_32b": _of("Exaone4", _sizes(102_400, 5120, 27_392, 64, 40, 8, 131_072, 1e-5, 1e6), head_dim=128)
    | {"rope_scaling": {**_LLAMA3_ROPE, "factor": 16.0}},
    "minimax_m2": _of("MiniMaxM2", _sizes(200_064, 3072, 1536, 62, 48, 8, 196_608, 1e-6, 5e6), head_dim=128)
    | {"rotary_dim": 64},
    "olmoe_1b_7b": _of("Olmoe", _sizes(50_304, 2048, 1024, 16, 16, 16, 4096, 1e-5, 1e4), num_experts=64),
    "glm4_9b_0414": _of("Glm4", _sizes(151_552, 4096, 13_696, 40, 32, 2, 32_768, 1e-5, 1e4), head_dim=128),
    "glm4_32b_0414": _of("Glm4", _sizes(151_552, 6144, 23_040, 61, 48, 8, 32_768, 1e-5, 1e4), head_dim=128)
    | {"attention_bias": False},
    "llama2_7b": _of("Llama", _LLAMA2_7B),
    "llama2_reward_7b": _of("Llama", _LLAMA2_7B)
    | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1},
    "mistral_reward_7b": _of("Mistral", _MISTRAL_7B, sliding_window=None)
    | {"architectures": ["MistralForSequenceClassification"], "num_labels": 1},
    "llama3_8b": _of("Llama", _LLAMA3_8B),
    "llama3_1_8b": _of("Llama", _LLAMA3_8B, rope_scaling=_LLAMA3_ROPE) | {"max_position_embeddings": 131_072},
    "llama3_2_1b": _of("Llama", _sizes(128_256, 2048, 8192, 16, 32, 8, 131_072, 1e-5, 5e5), True, head_dim=64)
    | {"rope_scaling": _LLAMA3_2_ROPE},
    "llama3_2_3b": _of("Llama", _sizes(128_256, 3072, 8192, 28, 24, 8, 131_072, 1e-5, 5e5), True, head_dim=128)
    | {"rope_scaling": _LLAMA3_2_ROPE},
    "mistral_7b": _of("Mistral", _MISTRAL_7B, sliding_window=None),
    "mistral_7b_v0_3": _of("Mistral", _sizes(32_768, 4096, 14_336, 32, 32, 8, 32_768, 1e-5, 1e6), sliding_window=None),
    "mistral_nemo_12b": _of("Mistral", _sizes(131_072, 5120, 14_336, 40, 32, 8, 131_072, 1e-5, 1e6), head_dim=128)
    | {"sliding_window": None},
    "mistral_small_24b": _of("Mistral", _sizes(131_072, 5120, 32_768, 40, 32, 8, 32_768, 1e-5, 1e8), head_dim=128)
    | {"sliding_window": None},
    "mistral_small_3_1_24b": _of("Mistral", _sizes(131_072, 5120, 32_768, 40, 32, 8, 131_072, 1e-5, 1e9), head_dim=128)
    | {"sliding_window": None},
    "code_llama2_7b": _of("Llama", _sizes(32_016, 4096, 11_008, 32, 32, 32, 16_384, 1e-5, 1e6)),
    "code_llama2_34b": _of("Llama", _sizes(32_000, 8192, 22_016, 48, 64, 8, 16_384, 1e-5, 1e6)),
    "seed_oss_36b": _of("SeedOss", _sizes(155_136, 5120, 27_648, 64, 80, 8, 524_288, 1e-6, 1e7), head_dim=128),
    "qwen2_7b": _qwen2(3584, 18_944, 28, 28, 4),
    "qwen2_0_5b": _qwen2(896, 4864, 24, 14, 2),
    "qwen2_1_5b": _qwen2(1536, 8960, 28, 12, 2),
    "qwen2_5_0_5b": _qwen2(896, 4864, 24, 14, 2),
    "qwen2_5_1_5b_base": _qwen2(1536, 8960, 28, 12, 2, long=True),
    "qwen2_5_1_5b_instruct": _qwen2(1536, 8960, 28, 12, 2),
    "qwen2_5_7b_base": _qwen2(3584, 18_944, 28, 28, 4, long=True),
    "qwen2_5_7b_instruct": _qwen2(3584, 18_944, 28, 28, 4),
    "qwen2_5_14b_base": _qwen2(5120, 13_824, 48, 40, 8, long=True, eps=1e-5),
    "qwen3_0_6b_base": _qwen3(1024, 3072, 28, 16, base=True),
    "qwen3_0_6b_instruct": _qwen3(1024, 3072, 28, 16),
    "qwen3_8b_base": _qwen3(4096, 12_288, 36, 32, base=True),
    "qwen3_8b_instruct": _qwen3(4096, 12_288, 36, 32),
    "mixtral_8x7b": _of("Mixtral", _sizes(32_000, 4096, 14_336, 32, 32, 8, 32_768, 1e-5, 1e6), num_local_experts=8)
    | {"router_aux_loss_coef": 0.02},
    "mixtral_8x22b": _of("Mixtral", _sizes(32_000, 6144, 16_384, 56, 48, 8, 65_536, 1e-5, 1e6), num_local_experts=8),
    "mixtral_8x22b_instruct": _of("Mixtral", _sizes(32_768, 6144, 16_384, 56, 48, 8, 65_536, 1e-5, 1e6)),
    "qwen3_30b_a3b_base": _qwen3_moe(2048, 6144, 768, 48, 32, base=True),
    "qwen3_30b_a3b_instruct": _qwen3_moe(2048, 6144, 768, 48, 32),
    "qwen3_235b_a22b": _qwen3_moe(4096, 12_288, 1536, 94, 64),
    "qwen3_next_80b_a3b": _of("Qwen3Next", _sizes(151_936, 2048, 5120, 48, 16, 2, 262_144, 1e-6, 1e7), head_dim=256),
    "glm4_5_air": _of("Glm4Moe", _sizes(151_552, 4096, 10_944, 46, 96, 8, 131_072, 1e-5, 1e6), **_GLM4_MOE),
    "glm4_5": _of("Glm4Moe", _sizes(151_552, 5120, 12_288, 92, 96, 8, 131_072, 1e-5, 1e6), **_GLM4_MOE)
    | {"n_routed_experts": 160, "moe_intermediate_size": 1536, "routed_scaling_factor": 2.5}
    | {"first_k_dense_replace": 3, "use_qk_norm": True},
    "llama4_scout_17b_16e": _of("Llama4", _sizes(202_048, 5120, 8192, 48, 40, 8, 10_485_760, 1e-5, 5e5))
    | {"rope_scaling": {**_LLAMA3_ROPE, "factor": 16.0, "high_freq_factor": 1.0}},
    "llama4_maverick_17b_128e": _of("Llama4", _sizes(202_048, 5120, 8192, 48, 40, 8, 1_048_576, 1e-5, 5e5))
    | {
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
    },
    "deepseek_v3": _of("DeepseekV3", _sizes(129_280, 7168, 18_432, 61, 128, 128, 163_840, 1e-6, 1e4), **_DEEPSEEK)
    | {
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
        | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    },
    "moonlight_16b_a3b": _of("DeepseekV3", _sizes(163_840, 2048, 11_264, 27, 16, 16, 8192, 1e-5, 5e4), **_DEEPSEEK)
    | {"q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
    | {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.446}
    | {"first_k_dense_replace": 1},
    "lfm2_350m": _of("Lfm2", _sizes(65_536, 1024, 6656, 16, 16, 8, 128_000, 1e-5, 1e6), **_LFM2, **_LFM2_AT),
    "lfm2_8b_a1b": _of("Lfm2Moe", _sizes(65_536, 2048, 7168, 24, 32, 8, 128_000, 1e-5, 1e6), **_LFM2)
    | {"layer_types": [*["conv", "conv", "full_attention", "conv"] * 5, "conv", "full_attention", "conv", "conv"]},
    # The rest of these equals the defaults of transformers' config class.
    "qwen3_5_9b": _of("Qwen3_5", {}, max_position_embeddings=262_144, rope_theta=1e7),
    "qwen3_5_27b": _of("Qwen3_5", _sizes(248_320, 5120, 17_408, 64, 24, 4, 262_144, 1e-6, 1e7))
    | {"linear_num_value_heads": 48},
    "qwen3_5_35b_a3b": _of("Qwen3_5Moe", {}, max_position_embeddings=262_144, rope_theta=1e7),
    "glm4_7_flash": _of("Glm4MoeLite", {}, rope_theta=1e6),
    "mistral4_119b": _of("Mistral4", {}),
    "smollm2_135m": _of("Llama", _sizes(49_152, 576, 1536, 30, 9, 3, 8192, 1e-5, 1e5), True),
    "smollm2_1_7b": _of("Llama", _sizes(49_152, 2048, 8192, 24, 32, 32, 8192, 1e-5, 130_000.0), True),
}

# Sizes that differ from a published one in DIMENSIONS alone -> number of parameters, as published, and that one.
COUNTED: dict[str, tuple[int, str]] = {
    "code_llama2_13b": (13_016_028_160, "code_llama2_7b"),
    "lfm2_700m": (742_489_344, "lfm2_350m"),
    "lfm2_1_2b": (1_170_340_608, "lfm2_350m"),
    "llama2_13b": (13_015_864_320, "llama2_7b"),
    "llama2_70b": (68_976_648_192, "llama2_7b"),
    "llama3_70b": (70_553_706_496, "llama3_8b"),
    "llama3_1_70b": (70_553_706_496, "llama3_1_8b"),
    "llama3_1_405b": (405_853_388_800, "llama3_1_8b"),
    "mistral_small_22b": (22_247_282_688, "mistral_7b_v0_3"),
    "ministral_8b": (8_019_808_256, "mistral_small_24b"),
    "olmo2_7b": (7_298_617_344, "olmo2_1b"),
    "olmo2_13b": (13_716_198_400, "olmo2_1b"),
    "olmo2_32b": (32_234_279_936, "olmo2_1b"),
    "qwen2_5_3b": (3_085_938_688, "qwen2_5_1_5b_instruct"),
    "qwen2_5_14b_instruct": (14_770_033_664, "qwen2_5_7b_instruct"),
    "qwen2_5_32b_base": (32_763_876_352, "qwen2_5_14b_base"),
    "qwen2_5_32b_instruct": (32_763_876_352, "qwen2_5_7b_instruct"),
    "qwen2_5_72b_base": (72_706_203_648, "qwen2_5_14b_base"),
    "qwen2_5_72b_instruct": (72_706_203_648, "qwen2_5_7b_instruct"),
    "qwen3_1_7b_base": (1_720_574_976, "qwen3_0_6b_base"),
    "qwen3_1_7b_instruct": (1_720_574_976, "qwen3_0_6b_instruct"),
    "qwen3_4b_base": (4_022_468_096, "qwen3_0_6b_base"),
    "qwen3_4b_instruct": (4_022_468_096, "qwen3_0_6b_instruct"),
    "qwen3_14b_base": (14_768_307_200, "qwen3_8b_base"),
    "qwen3_14b_instruct": (14_768_307_200, "qwen3_8b_instruct"),
    "qwen3_32b": (32_762_123_264, "qwen3_8b_instruct"),
    "smollm2_360m": (361_821_120, "smollm2_135m"),
}
DIMENSIONS = ("num_layers", "embed_dim", "intermediate_dim", "num_heads", "num_kv_heads")

# Fields of descriptions and counts that model cards state, of models for which there is no other source here. Their
# fields outside OF_SIZES equal the defaults of transformers' config class.
STATED: dict[str, dict[str, Any]] = {
    "gemma4_e2b": {
        "parameters": 4_628_569_379,
        "num_layers": 35,
        "window": 512,
        "max_seq_len": 131_072,
        "num_experts": 0,
    },
    "gemma4_e4b": {
        "parameters": 7_463_013_418,
        "num_layers": 42,
        "window": 512,
        "max_seq_len": 131_072,
        "num_experts": 0,
    },
    "gemma4_26b_a4b": {"parameters": 25_233_141_790, "num_layers": 30, "window": 1024, "max_seq_len": 262_144}
    | {"num_experts": 128, "experts_per_token": 8},
    "gemma4_31b": {
        "parameters": 30_697_345_340,
        "num_layers": 60,
        "window": 1024,
        "max_seq_len": 262_144,
        "num_experts": 0,
    },
}
OF_SIZES = """num_layers embed_dim intermediate_dim max_seq_len num_heads num_kv_heads window window_layers embed_scale
    full_num_kv_heads full_keys_as_values shared_kv_layers shared_kv_intermediate_dim layer_embed_dim layer_embed_vocab
    num_experts experts_per_token expert_dim router_normalize shared_expert_dim expert_norms router_norm
    logit_softcap""".split()
