"""Compatibility: says what became of an experiment that a recipe copied from earlier releases imports."""

raise ImportError(
    "torchtune.modules.early_exit_loss (early_exit_loss, EarlyExitCurriculum) is not part of this library: early exit "
    "was an experiment; train with full_finetune_distributed instead."
)
