"""Compatibility: explains to recipes copied from earlier releases that layer dropout was removed."""

raise ImportError(
    "torchtune.modules.layer_dropout (LayerDropout, prepare_layer_dropout) is not part of this library: layer dropout "
    "belonged to the early exit experiment; train with full_finetune_distributed instead."
)
