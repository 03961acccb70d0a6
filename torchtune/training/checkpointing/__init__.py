"""Checkpoints: loading, saving and resuming models as streams of named tensors."""

from torchtune.training.checkpointing._checkpointer import (
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
)
from torchtune.training.checkpointing._classifier import update_state_dict_for_classifier
from torchtune.training.checkpointing._contents import checkpoint_contents
from torchtune.training.checkpointing._directories import ResumePoint, checkpoints_in, verify_checkpoint
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._gguf import GGUFFile
from torchtune.training.checkpointing._gguf_to_hf import gguf_to_hf
from torchtune.training.checkpointing._legacy import get_largest_iter_folder
from torchtune.training.checkpointing._model_source import ModelSource
from torchtune.training.checkpointing._model_type import (
    ADAPTER_CONFIG,
    ADAPTER_KEY,
    DATALOADER_KEY,
    EPOCHS_KEY,
    MAX_STEPS_KEY,
    MODEL_KEY,
    OPT_KEY,
    RNG_KEY,
    SEED_KEY,
    STEPS_KEY,
    TOTAL_EPOCHS_KEY,
    VAL_DATALOADER_KEY,
    ModelType,
)
from torchtune.training.checkpointing._models_of_run import add_reference
from torchtune.training.checkpointing._sources import FormattedCheckpointFiles, safe_torch_load
from torchtune.training.checkpointing._store import CheckpointStore

Checkpointer = FullModelHFCheckpointer | FullModelMetaCheckpointer | FullModelTorchTuneCheckpointer

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_KEY",
    "DATALOADER_KEY",
    "EPOCHS_KEY",
    "MAX_STEPS_KEY",
    "MODEL_KEY",
    "OPT_KEY",
    "RNG_KEY",
    "SEED_KEY",
    "STEPS_KEY",
    "TOTAL_EPOCHS_KEY",
    "VAL_DATALOADER_KEY",
    "CheckpointError",
    "CheckpointStore",
    "Checkpointer",
    "FormattedCheckpointFiles",
    "FullModelHFCheckpointer",
    "FullModelMetaCheckpointer",
    "FullModelTorchTuneCheckpointer",
    "GGUFFile",
    "ModelSource",
    "ModelType",
    "ResumePoint",
    "add_reference",
    "checkpoint_contents",
    "checkpoints_in",
    "get_largest_iter_folder",
    "gguf_to_hf",
    "safe_torch_load",
    "update_state_dict_for_classifier",
    "verify_checkpoint",
]
