"""Names of earlier releases: one table of former paths, used by imports, attributes and ``_component_`` paths.

``torchtune`` installs a finder that asks :func:`find_spec` for modules that do not exist, and modules with former names
ask :func:`attribute` for names that they lack (:mod:`torchtune._lazy`). To move a name, add a row here.
"""

import importlib
import sys
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _names(module: str, target: str, names: str) -> dict[str, str]:
    """Return rows of names that have the same name in another module."""
    return {f"{module}.{name}": f"{target}.{name}" for name in names.split()}


def _modules(package: str, modules: str) -> dict[str, str]:
    """Return rows of modules whose package exports their names."""
    return {f"{package}.{module}": package for module in modules.split()}


def _paths(package: str, names: str) -> list[str]:
    """Return the dotted paths of names in a package."""
    return [f"{package}.{name}" for name in names.split()]


_TOKENIZER_MODULES = "_gpt2 _hf_tokenizer _sentencepiece _tiktoken _utils"
_TIKTOKEN_LIMITS = "MAX_ENCODE_CHARS MAX_NO_WHITESPACE_CHARS"
# Former module -> module that has its names. A former module may still exist, with a part of its names.
MODULES = {
    **dict.fromkeys(
        ("torchtune._cli.cat", "torchtune._cli.cp", "torchtune._cli.ls"),
        "torchtune._cli.ls_cp_cat",
    ),
    "torchtune._cli.validate": "torchtune._cli.checks",
    **_modules("torchtune.config", "_errors _instantiate _parse _utils _validate"),
    **_modules("torchtune.data", "_collate _common _messages _prompt_templates _utils"),
    **_modules(
        "torchtune.datasets",
        "_alpaca _chat _cnn_dailymail _concat _grammar _hh_rlhf_helpful _instruct _packed _preference _samsum _sft "
        "_slimorca _stack_exchange_paired _text_completion _wikitext",
    ),
    "torchtune.datasets._stack_exchanged_paired": "torchtune.datasets",
    **_modules("torchtune.datasets.multimodal", "_llava_instruct _multimodal _the_cauldron _vqa"),
    **_modules("torchtune.generation", "_generation"),
    "torchtune.dev.rl": "torchtune.dev.grpo",
    "torchtune.dev.rl.types": "torchtune.dev.grpo.types",
    **_modules("torchtune.models.clip", "_component_builders _model_builders _position_embeddings _transform"),
    "torchtune.models.clip.inference": "torchtune.models.clip",
    "torchtune.models.clip.inference._transform": "torchtune.models.clip",
    **_modules("torchtune.models.gemma", "_component_builders _model_builders _tokenizer"),
    **_modules("torchtune.models.gemma2", "_component_builders _convert_weights _model_builders"),
    **_modules("torchtune.models.llama2", "_component_builders _model_builders _prompt_template _tokenizer"),
    "torchtune.models.llama2._model_utils": "torchtune.models._builders",
    **_modules("torchtune.models.llama3", "_component_builders _model_builders _parallelism _tokenizer"),
    "torchtune.models.llama3._model_utils": "torchtune.models._builders",
    **_modules("torchtune.models.llama3_1", "_component_builders _model_builders _position_embeddings"),
    **_modules("torchtune.models.llama3_2", "_component_builders _model_builders"),
    **_modules("torchtune.models.llama3_2_vision", "_component_builders _encoder _model_builders _transform"),
    **_modules("torchtune.models.llama3_3", "_model_builders"),
    **_modules(
        "torchtune.models.llama4", "_component_builders _encoder _model_builders _parallelism _tokenizer _transform"
    ),
    **_modules("torchtune.models.mistral", "_component_builders _model_builders _prompt_template _tokenizer"),
    **_modules(
        "torchtune.models.phi3", "_component_builders _convert_weights _model_builders _position_embeddings _tokenizer"
    ),
    **_modules("torchtune.models.phi4", "_model_builders _tokenizer"),
    **_modules(
        "torchtune.models.qwen2",
        "_component_builders _convert_weights _model_builders _positional_embeddings _tokenizer",
    ),
    **_modules("torchtune.models.qwen2_5", "_model_builders _tokenizer"),
    **_modules("torchtune.models.qwen3", "_component_builders _model_builders _tokenizer"),
    "torchtune.models.qwen3._convert_weights": "torchtune.models.qwen2",
    **_modules("torchtune.models.smol", "_component_builders _model_builders"),
    "torchtune.models.clip._convert_weights": "torchtune.compat._former_models",
    "torchtune.models.gemma.rms_norm": "torchtune.compat",
    "torchtune.models.llama3_2_vision._convert_weights": "torchtune.compat._former_models",
    "torchtune.models.llama4._convert_weights": "torchtune.compat._former_models",
    "torchtune.models.t5": "torchtune.models",
    "torchtune.models.t5._convert_weights": "torchtune.compat._former_models",
    **_modules("torchtune.modules", "attention_utils classifier common_utils embedding_utils"),
    "torchtune.modules.fake_quant": "torchtune.modules.low_precision.quantizers",
    "torchtune.modules.low_precision.nf4_linear": "torchtune.modules.low_precision",
    "torchtune.modules.stored_linear": "torchtune.modules.low_precision.layers",
    "torchtune.modules.torchao_formats": "torchtune.modules.low_precision.torchao_interface",
    "torchtune.modules.layer_norm": "torchtune.modules",
    **_modules("torchtune.modules.loss", "ce_chunked_output_loss cross_entropy_loss kd_losses loss_types"),
    **_modules("torchtune.modules.model_fusion", "_deep_fusion _early_fusion _fusion_layers _fusion_utils"),
    "torchtune.modules.tanh_gate": "torchtune.modules",
    "torchtune.modules.tied_linear": "torchtune.modules",
    "torchtune.modules.transformer": "torchtune.modules",
    "torchtune.modules.transforms._transforms": "torchtune.modules.transforms",
    "torchtune.modules.transforms.vision_utils": "torchtune.modules.transforms.vision",
    **dict.fromkeys(
        (
            "torchtune.modules.transforms.vision_utils.get_canvas_best_fit",
            "torchtune.modules.transforms.vision_utils.get_inscribed_size",
            "torchtune.modules.transforms.vision_utils.resize_with_pad",
            "torchtune.modules.transforms.vision_utils.tile_crop",
        ),
        "torchtune.modules.transforms.vision",
    ),
    "torchtune.modules.transforms.vision_utils.pad_dim_to_size": "torchtune.compat",
    "torchtune.modules.moe.utils": "torchtune.compat",
    "torchtune.modules.rlhf": "torchtune.rlhf",  # in 0.2
    "torchtune.modules.rlhf.loss": "torchtune.rlhf.loss",
    **_modules("torchtune.modules.peft", "_utils dora lora"),
    "torchtune.modules.peft.lora_experts": "torchtune.modules.peft.lora",
    "torchtune.modules.peft.peft_utils": "torchtune.modules.peft",  # until 0.3
    "torchtune.modules.tokenizers": "torchtune.tokenizers",
    **dict.fromkeys(_paths("torchtune.modules.tokenizers", _TOKENIZER_MODULES), "torchtune.tokenizers"),
    **dict.fromkeys(_paths("torchtune.modules.transforms.tokenizers", _TOKENIZER_MODULES), "torchtune.tokenizers"),
    **_modules("torchtune.rlhf", "_types"),
    "torchtune.rlhf.utils": "torchtune.compat",
    "torchtune.rlhf.utils._convert_weights": "torchtune.compat",
    **_modules("torchtune.training", "_activation_offloading _compile _distributed _grad_scaler _model_util _profiler"),
    "torchtune.training.memory": "torchtune.compat",
    "torchtune.training.pooling": "torchtune.training",
    "torchtune.training.compat": "torchtune.compat",
    "torchtune.training.checkpointing._checkpoint_client": "torchtune.compat",
    "torchtune.training.checkpointing._checkpointer": "torchtune.training",
    "torchtune.training.checkpointing._utils": "torchtune.training",
    # until 0.2, `training` was a part of `utils`
    "torchtune.utils._checkpointing": "torchtune.training",
    "torchtune.utils._checkpointing._checkpointer": "torchtune.training",
    "torchtune.utils._checkpointing._checkpointer_utils": "torchtune.training",
    "torchtune.utils._device": "torchtune.utils",
    "torchtune.utils._distributed": "torchtune.training",
    "torchtune.utils._generation": "torchtune.generation",
    "torchtune.utils._logging": "torchtune.utils",
    "torchtune.utils._profiler": "torchtune.training",
    "torchtune.utils.activations": "torchtune.training",
    "torchtune.utils.collate": "torchtune.data",
    "torchtune.utils.logging": "torchtune.utils",
    "torchtune.utils.memory": "torchtune.training",
    "torchtune.utils.metric_logging": "torchtune.training.metric_logging",
    "torchtune.utils.pooling": "torchtune.training",
    "torchtune.utils.precision": "torchtune.training",
    "torchtune.utils.quantization": "torchtune.training.quantization",
    "torchtune.utils.seed": "torchtune.training",
}

_CHECKPOINT_HELPERS = (
    "ADAPTER_CONFIG_FNAME ADAPTER_MODEL_FNAME RECIPE_STATE_DIRNAME REPO_ID_FNAME SAFETENSOR_INDEX_FNAME SHARD_FNAME "
    "SUFFIXES_TO_NOT_COPY TORCH_INDEX_FNAME check_outdir_not_in_ckptdir copy_files get_adapter_checkpoint_path "
    "get_model_checkpoint_path get_path get_recipe_checkpoint_path"
)

# Former name -> present name.
NAMES = {
    "torchtune.config._utils._get_component_from_path": "torchtune.config.locate",
    "torchtune.config._utils._has_component": "torchtune.config._document.is_component",
    **_names("torchtune.config._utils", "torchtune.compat._former_training", "_merge_yaml_and_cli_args"),
    **_names("torchtune.config._parse", "torchtune.compat", "TuneRecipeArgumentParser"),
    "torchtune.data._common.PACK_TYPE": "torchtune.compat.PACK_TYPE",
    "torchtune.data._utils.chain": "torchtune.compat._former_datasets.chain",
    **_names(
        "torchtune.data._utils", "torchtune.compat._former_datasets", "get_dataloader get_multi_dataset load_hf_dataset"
    ),
    "torchtune.data._prompt_templates._TemplateType": "torchtune.data.TemplateType",
    "torchtune.data._prompt_templates._get_prompt_template": "torchtune.data.get_prompt_template",
    "torchtune.data.JSONToMessages": "torchtune.data.OpenAIToMessages",  # in 0.3
    "torchtune.datasets._instruct._get_component_from_path": "torchtune.config.locate",
    "torchtune.datasets.stack_exchanged_paired_dataset": "torchtune.datasets.stack_exchange_paired_dataset",
    "torchtune.datasets._stack_exchanged_paired.stack_exchanged_paired_dataset": (
        "torchtune.datasets.stack_exchange_paired_dataset"
    ),
    **_names(
        "torchtune.datasets.multimodal._the_cauldron",
        "torchtune.datasets.multimodal",
        "TheCauldronToMessages",
    ),
    "torchtune.generation._generation.update_stop_tokens_tracker": "torchtune.compat.update_stop_tokens_tracker",
    **_names(
        "torchtune.models.convert_weights", "torchtune.compat._former_models", "_FROM_HF _FROM_META _TO_PEFT_KEYS"
    ),
    "torchtune.models.clip.inference._transform._CLIPImageTransform": "torchtune.models.clip.CLIPImageTransform",
    "torchtune.models.phi4.phi4_14b_tokenizer": "torchtune.models.phi4.phi4_tokenizer",
    **{
        f"torchtune.models.{family}._component_builders.{name}": "torchtune.compat.swiglu_mlp"
        for family, name in {
            "llama2": "llama2_mlp",
            "llama3": "llama3_mlp",
            "llama3_1": "llama3_mlp",
            "llama3_2": "llama3_mlp",
            "mistral": "mistral_mlp",
            "phi3": "phi3_mlp",
            "qwen2": "qwen2_mlp",
            "qwen3": "qwen3_mlp",
        }.items()
    },
    **{
        f"torchtune.models.qwen3._convert_weights.qwen3_{way}": f"torchtune.models.qwen2.qwen2_{way}"
        for way in ("hf_to_tune", "tune_to_hf")
    },
    "torchtune.modules.CausalSelfAttention": "torchtune.modules.MultiHeadAttention",
    "torchtune.modules.TransformerDecoderLayer": "torchtune.modules.TransformerSelfAttentionLayer",
    "torchtune.modules.attention.CausalSelfAttention": "torchtune.modules.MultiHeadAttention",
    "torchtune.modules.transformer.TransformerDecoderLayer": "torchtune.modules.TransformerSelfAttentionLayer",
    **_names("torchtune.modules", "torchtune.training.lr_schedulers", "get_cosine_schedule_with_warmup"),
    "torchtune.modules.lr_schedulers": "torchtune.training.lr_schedulers",
    **{
        f"torchtune.modules.{module}.reparametrize_as_bf16_state_dict_post_hook": (
            "torchtune.modules.low_precision.reparametrize_as_dtype_state_dict_post_hook"
        )
        for module in ("common_utils", "low_precision")
    },
    **_names(
        "torchtune.modules.transforms",
        "torchtune.modules.transforms.vision",
        "get_canvas_best_fit resize_with_pad tile_crop",
    ),
    **_names("torchtune.modules.loss", "torchtune.rlhf.loss", "DPOLoss RSOLoss SimPOLoss"),
    **_names("torchtune.modules.loss", "torchtune.compat", "keep_row_losses"),
    "torchtune.modules.attention_utils._MaskType": "torchtune.modules.kernels.attention.MaskType",
    **_names("torchtune.modules.attention_utils", "torchtune.compat", "causal_mask_flex kv_offset_mask_flex"),
    **_names(
        "torchtune.modules.attention_utils",
        "torchtune.compat._former_models",
        "_sdpa_or_flex_attention flex_attention_compiled",
    ),
    **_names(
        "torchtune.modules.attention_utils",
        "torchtune.modules.kernels.flex",
        "compile_flex_attention compile_friendly_flex_attention",
    ),
    **_names("torchtune.modules.common_utils", "torchtune.compat", "slice_str_to_array"),
    **_names(
        "torchtune.modules.common_utils",
        "torchtune.compat._former_models",
        "_low_ram_reparametrize_as_dtype_state_dict_post_hook _register_reparametrize_state_dict_hooks "
        "_use_low_cpu_ram",
    ),
    "torchtune.modules.moe.experts.LoRAGroupedExperts": "torchtune.modules.peft.lora.LoRAGroupedExperts",
    **_names("torchtune.modules.peft", "torchtune.compat", "load_dora_magnitudes validate_state_dict_for_lora"),
    **_names(
        "torchtune.modules.peft.peft_utils", "torchtune.compat", "load_dora_magnitudes validate_state_dict_for_lora"
    ),
    **_names("torchtune.modules.peft._utils", "torchtune.compat", "load_dora_magnitudes"),
    **_names("torchtune.modules.tokenizers._tiktoken", "torchtune.tokenizers._byte_pair_encoding", _TIKTOKEN_LIMITS),
    **_names(
        "torchtune.modules.transforms.tokenizers._tiktoken",
        "torchtune.tokenizers._byte_pair_encoding",
        _TIKTOKEN_LIMITS,
    ),
    **_names("torchtune.training.checkpointing._utils", "torchtune.compat", _CHECKPOINT_HELPERS),
    **_names("torchtune.training.checkpointing._utils", "torchtune.checkpoints", "get_largest_iter_folder"),
    **_names("torchtune.training.checkpointing._utils", "torchtune.checkpoints", "safe_torch_load"),
    **_names("torchtune.training.checkpointing._checkpointer", "torchtune.checkpoints", "safe_torch_load"),
    "torchtune.training.checkpointing._checkpointer._CheckpointerInterface": "torchtune.compat.CheckpointerInterface",
    **_names("torchtune.training.checkpointing._checkpointer", "torchtune.compat", _CHECKPOINT_HELPERS),
    **_names("torchtune.training.quantization", "torchtune.checkpoints", "check_quantizer quantize_checkpoint"),
    "torchtune.training.checkpointing._utils.save_config": "torchtune.training.metric_logging.save_config",
    **_names("torchtune.utils._checkpointing._checkpointer_utils", "torchtune.checkpoints", "safe_torch_load"),
    **_names(
        "torchtune.utils",
        "torchtune.training",
        "ADAPTER_CONFIG ADAPTER_KEY Checkpointer DEFAULT_PROFILER_ACTIVITIES DEFAULT_PROFILE_DIR DEFAULT_SCHEDULE "
        "DEFAULT_TRACE_OPTS DummyProfiler EPOCHS_KEY FullModelHFCheckpointer FullModelMetaCheckpointer "
        "FullModelTorchTuneCheckpointer MAX_STEPS_KEY MODEL_KEY ModelType OPT_KEY OptimizerInBackwardWrapper "
        "PROFILER_KEY RNG_KEY SEED_KEY TOTAL_EPOCHS_KEY apply_selective_activation_checkpointing "
        "cleanup_before_training compile_loss compile_model create_optim_in_bwd_wrapper get_dtype "
        "get_full_optimizer_state_dict get_memory_stats get_quantizer_mode get_unmasked_sequence_lengths "
        "init_distributed is_distributed load_from_full_model_state_dict load_from_full_optimizer_state_dict "
        "log_memory_stats register_optim_in_bwd_hooks set_activation_checkpointing set_default_dtype set_seed "
        "set_torch_num_threads setup_torch_profiler update_state_dict_for_classifier validate_expected_param_dtype "
        "validate_no_params_on_meta_device",
    ),
    "torchtune.training.get_full_model_state_dict": "torchtune.training.gather_cpu_state_dict",
    "torchtune.utils.get_full_model_state_dict": "torchtune.training.gather_cpu_state_dict",
    **_names("torchtune.utils", "torchtune.data", "left_pad_sequence padded_collate padded_collate_dpo"),
    **_names("torchtune.utils", "torchtune.generation", "generate"),
    **_names("torchtune.utils", "torchtune.compat", "TuneRecipeArgumentParser"),
    **_names("torchtune.utils.collate", "torchtune.data", "padded_collate_sft"),
    "torchtune.utils.collate.padded_collate": "torchtune.data.padded_collate_sft",
    "torchao.prototype.low_bit_optim": "torchao.optim",
}

_SFT_TEMPLATE = (
    "instruct templates are gone since 0.4: `prompt_template` of a tokenizer puts text around turns, alpaca_dataset "
    "reads rows of instruction, input and output, and torchtune.data.InputOutputToMessages other rows."
)
_CHAT_FORMAT = (
    "chat formats are gone since 0.4: tokenizers lay out chats themselves; torchtune.data.PromptTemplate, and "
    "`prompt_template` of a tokenizer, put other text around turns."
)
_CONVERTERS = (
    "message converters are gone since 0.4: torchtune.data.OpenAIToMessages and torchtune.data.ShareGPTToMessages "
    "convert rows to messages."
)
_FSDP1_NAMES = (
    "FSDPPolicyType contains_fsdp get_full_finetune_fsdp_wrap_policy lora_fsdp_wrap_policy "
    "prepare_model_for_fsdp_with_meta_device transform_opt_state_dict wrap_fsdp"
)
_FSDP1 = (
    "FSDP1 and its wrap policies were gone by 0.7: torchtune.training.parallelize shards with FSDP2, and "
    "torchtune.training.shard_model, with get_shard_conditions, does so in older recipes."
)
_EARLY_EXIT = "early exit was an experiment: train with full_finetune_distributed instead."
_RL = (
    "the reinforcement learning of torchtune.dev is gone since 0.8: it is in torchtune.rlhf and the recipe grpo "
    "(`tune cp grpo mine.py`); the Ray actors of torchtune.dev.rl.workers do not come."
)
_IMAGE_MAKING = "models that make images are not in this release; VisionTransformer and CLIP's vision encoder are."

# Former module or name, with everything below it -> its replacement, as a sentence.
GONE = {
    **dict.fromkeys(
        (
            "torchtune.data._instruct_templates",
            *_names("torchtune.data", "", "AlpacaInstructTemplate InstructTemplate StackExchangedPairedTemplate"),
        ),
        _SFT_TEMPLATE,
    ),
    **dict.fromkeys(
        (
            "torchtune.data._chat_formats",
            *_names("torchtune.data", "", "ChatFormat ChatMLFormat Llama2ChatFormat MistralChatFormat"),
        ),
        _CHAT_FORMAT,
    ),
    **dict.fromkeys(
        (
            "torchtune.data._converters",
            *_names("torchtune.data", "", "get_openai_messages get_sharegpt_messages sharegpt_to_llama2_messages"),
        ),
        _CONVERTERS,
    ),
    **{
        f"torchtune.datasets.{name}": f"it is gone since 0.4: torchtune.datasets.{builder} builds the dataset, and "
        "torchtune.datasets.SFTDataset takes a `message_transform` of your own."
        for name, builder in {
            "ChatDataset": "chat_dataset",
            "InstructDataset": "instruct_dataset",
            "_chat.ChatDataset": "chat_dataset",
            "_instruct.InstructDataset": "instruct_dataset",
        }.items()
    },
    **dict.fromkeys(_paths("torchtune.training", _FSDP1_NAMES), _FSDP1),
    **dict.fromkeys(_paths("torchtune.utils", _FSDP1_NAMES), _FSDP1),
    "torchtune.modules.TiedEmbeddingTransformerDecoder": (
        "it was gone by 0.7: torchtune.modules.TransformerDecoder takes a torchtune.modules.TiedLinear as its output."
    ),
    "torchtune.utils.profiler": (
        "torchtune.training.setup_torch_profiler makes a profiler since 0.2, and returns it with its settings."
    ),
    **dict.fromkeys(
        (
            "torchtune.modules.LayerDropout",
            "torchtune.modules.early_exit_loss",
            "torchtune.modules.layer_dropout",
            "torchtune.modules.prepare_layer_dropout",
        ),
        _EARLY_EXIT,
    ),
    "torchtune.dev.rl": _RL,
    "torchtune.dev.grpo.generation": "use torchtune.rlhf.LocalSampler.",
    "torchtune.dev.grpo.rewards": "use torchtune.rlhf.reward_functions.",
    **dict.fromkeys(
        ("torchtune.dev.grpo.data.RLDataset", "torchtune.dev.grpo.data.padded_collate_rl"),
        "answers are not padded any more: torchtune.datasets.prompt_dataset makes prompts.",
    ),
    "torchtune.dev.grpo.loss.GRPOWithChunkedOutputLoss": "torchtune.rlhf.loss.GRPOLoss never holds all logits.",
    **dict.fromkeys(
        (
            *_names("torchtune.models.clip", "", "clip_text_encoder clip_text_vit_large_patch14 clip_tokenizer"),
            "torchtune.models.clip._text_encoder",
            "torchtune.models.clip._tokenizer",
            "torchtune.models.flux",
            "torchtune.models.t5",
            "torchtune.modules.VectorQuantizedEmbeddings",
            "torchtune.modules.VisionRotaryPositionalEmbeddings",
            "torchtune.modules.vq_embeddings",
        ),
        _IMAGE_MAKING,
    ),
    "torchtune.models.gemma.transformer": (
        "it is gone since 0.4: torchtune.models.gemma.gemma builds a torchtune.modules.TransformerDecoder."
    ),
    **dict.fromkeys(
        _names("torchtune.training", "", "DistributedCheckpointer checkpointing.DistributedCheckpointer"),
        "its checkpoints carried a pickle: `enable_async_checkpointing` of a recipe writes shards, and so does `save` "
        "of FullModelHFCheckpointer.",
    ),
}


# Arguments of functions in earlier releases: (the start of a function's path, argument) -> replacement. An argument
# without a replacement has no effect.
ARGUMENTS = {
    ("torchtune.datasets.", "trust_remote_code"): None,
    ("torchtune.datasets.", "max_seq_len"): "set `tokenizer.max_seq_len`.",
    ("torchtune.datasets.instruct_dataset", "template"): _SFT_TEMPLATE,
    ("torchtune.datasets.chat_dataset", "chat_format"): _CHAT_FORMAT,
}


def former_argument(path: str, argument: str) -> tuple[bool, str | None]:
    """Return whether a function took an argument in earlier releases, and its replacement, if any."""
    for (start, name), replacement in ARGUMENTS.items():
        if name == argument and path.startswith(start):
            return True, replacement
    return False, None


def explain_gone(path: str) -> str | None:
    """Return a sentence with the replacement of the module or name at ``path``, or ``None`` if it is not gone."""
    if path in MODULES or path in NAMES:
        return None
    parts = path.split(".")
    for end in range(len(parts), 1, -1):
        outer = ".".join(parts[:end])
        if outer in GONE:
            return f"{path} is not part of this library: {GONE[outer]}"
        if outer in MODULES or outer in NAMES:
            return None
    return None


def present_path(path: str) -> str:
    """Return the current path of a component that another package has moved; other paths are returned unchanged."""
    module, _, name = path.rpartition(".")
    if module.startswith("torchtune.") or module not in NAMES:
        return path
    present = f"{NAMES[module]}.{name}"
    _warn(path, present)
    return present


def attribute(module: str, name: str) -> Any:
    """Return the object that replaces a name of ``module`` from an earlier release; warn once with its new path.

    Raises:
        AttributeError: no earlier release had the name, or it was removed.
        ImportError: the name was removed, and ``module`` is not a package: ``from module import name`` would replace
            the message of an AttributeError.
    """
    path = f"{module}.{name}"
    present = NAMES.get(path)
    if present is None and path in MODULES:  # a former submodule, which the finder makes
        return importlib.import_module(path)
    explanation = explain_gone(path)
    if explanation is not None:
        if hasattr(sys.modules[module], "__path__"):  # a package: import looks for a submodule next, see find_spec
            raise AttributeError(explanation)
        raise ImportError(explanation)
    # Python itself asks for names such as __file__, which belong to a module and do not move.
    if present is None and module in MODULES and not name.startswith("__"):
        present = f"{MODULES[module]}.{name}"
    missing = AttributeError(f"module '{module}' has no attribute '{name}'")
    if present is None:
        raise missing
    present_module, _, present_name = present.rpartition(".")
    try:
        value = getattr(importlib.import_module(present_module), present_name)
    except AttributeError:
        raise missing from None  # about the name that was asked for
    _warn(path, present)
    setattr(sys.modules[module], name, value)  # found without this function from now on
    return value


def _warn(path: str, present: str) -> None:
    """Log the present path of a former name, once."""
    from torchtune.utils import get_logger, log_once

    log_once(get_logger(), f"{path} has moved to {present}: update the import, or the path in the config.", level=30)


def find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module from an earlier release, or ``None`` if no release had it.

    Raises:
        ImportError: the module was removed; the message names the replacement.
    """
    explanation = explain_gone(name)
    if explanation is not None:
        raise ImportError(explanation, name=name)
    if name in MODULES:
        return ModuleSpec(name, _FormerModuleLoader(), is_package=True)
    return None


class _FormerModuleLoader(Loader):
    """Loader of the modules that have a former name in the table."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill the new module."""
        target = MODULES[module.__name__]
        module.__doc__ = f"Former address of :mod:`{target}`."
        module.__getattr__ = partial(attribute, module.__name__)
        module.__dir__ = lambda: dir(importlib.import_module(target))
