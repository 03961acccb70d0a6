"""Compatibility: what recipes that were copied from earlier releases call, built on today's store and parallelism.

No recipe and no module of this library uses these functions. Earlier import paths (``torchtune.training.X``,
``torchtune.training.checkpointing._checkpoint_client``) point here.
"""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "CheckpointClient": "_checkpoint_client",
        "TrainingProgress": "_checkpoint_client",
        "gather_cpu_state_dict": "_state_dicts",
        "get_context_parallel_manager": "_parallel",
        "get_full_optimizer_state_dict": "_state_dicts",
        "get_train_context": "_parallel",
        "get_world_size_and_rank": "_parallel",
        "init_distributed": "_parallel",
        "load_from_full_model_state_dict": "_state_dicts",
        "load_from_full_optimizer_state_dict": "_state_dicts",
        "scale_grads": "_parallel",
        "shard_model": "_parallel",
    },
)
