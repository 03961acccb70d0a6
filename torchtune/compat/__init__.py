"""Compatibility: functions for recipes copied from earlier releases, built on the current library.

The library itself does not use them. Earlier import paths (``torchtune.training.X``,
``torchtune.training.checkpointing._checkpoint_client``) resolve to this package.
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
        "OptimizerInBackwardWrapper": "_optimizer_in_backward",
        "create_optim_in_bwd_wrapper": "_optimizer_in_backward",
        "register_optim_in_bwd_hooks": "_optimizer_in_backward",
    },
)
