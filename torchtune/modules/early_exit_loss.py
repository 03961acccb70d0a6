"""Compatibility: explains to recipes copied from earlier releases that early exit was removed."""

raise ImportError(
    "torchtune.modules.early_exit_loss (early_exit_loss, EarlyExitCurriculum) is not part of this library: early exit "
    "was an experiment; train with full_finetune_distributed instead."
)
