"""Compatibility: functions for recipes copied from earlier releases, built on the current library.

The library itself does not use them. The table in ``_former_names`` leads former modules and names, of all packages, to
the present ones.
"""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "CheckpointClient": "_client",
        "TrainingProgress": "_client",
        "gather_cpu_state_dict": "_state_dicts",
        "get_context_parallel_manager": "_former_parallel",
        "get_full_optimizer_state_dict": "_state_dicts",
        "get_train_context": "_former_parallel",
        "get_world_size_and_rank": "_former_parallel",
        "init_distributed": "_former_parallel",
        "load_from_full_model_state_dict": "_state_dicts",
        "load_from_full_optimizer_state_dict": "_state_dicts",
        "scale_grads": "_former_parallel",
        "shard_model": "_former_parallel",
        **dict.fromkeys(
            (
                "ADAPTER_CONFIG_FNAME",
                "ADAPTER_MODEL_FNAME",
                "CheckpointerInterface",
                "RECIPE_STATE_DIRNAME",
                "REPO_ID_FNAME",
                "SAFETENSOR_INDEX_FNAME",
                "SHARD_FNAME",
                "SUFFIXES_TO_NOT_COPY",
                "TORCH_INDEX_FNAME",
                "check_outdir_not_in_ckptdir",
                "copy_files",
                "get_adapter_checkpoint_path",
                "get_model_checkpoint_path",
                "get_path",
                "get_recipe_checkpoint_path",
            ),
            "_checkpoint_files",
        ),
        **dict.fromkeys(
            (
                "GemmaRMSNorm",
                "PACK_TYPE",
                "TuneRecipeArgumentParser",
                "load_dora_magnitudes",
                "swiglu_mlp",
                "update_stop_tokens_tracker",
                "validate_state_dict_for_lora",
            ),
            "_pieces",
        ),
        "OptimizerInBackwardWrapper": "_optimizer_in_backward",
        "create_optim_in_bwd_wrapper": "_optimizer_in_backward",
        "register_optim_in_bwd_hooks": "_optimizer_in_backward",
    },
)
