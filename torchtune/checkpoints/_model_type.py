"""Model types and keys of checkpoint dicts, as spelled in YAML configs and copied recipes."""

from enum import Enum

ADAPTER_CONFIG = "adapter_config"
ADAPTER_KEY = "adapter"
DATALOADER_KEY = "dataloader"
EPOCHS_KEY = "epochs_run"
MAX_STEPS_KEY = "max_steps_per_epoch"
MODEL_KEY = "model"
OPT_KEY = "optimizer"
RNG_KEY = "rng_state"
SEED_KEY = "seed"
STEPS_KEY = "steps_run"
TOTAL_EPOCHS_KEY = "total_epochs"
VAL_DATALOADER_KEY = "val_dataloader"


class ModelType(Enum):
    """Allowed values of ``model_type:``, which must match the spec of the model.

    Example:
        >>> torchtune.training.ModelType["QWEN3"].name
        'QWEN3'
    """

    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    LLAMA2 = "llama2"
    LLAMA3 = "llama3"
    LLAMA3_2 = "llama3_2"
    LLAMA3_VISION = "llama3_vision"
    LLAMA4 = "llama4"
    MISTRAL = "mistral"
    PHI3_MINI = "phi3_mini"
    PHI4 = "phi4"
    REWARD = "reward"
    QWEN2 = "qwen2"
    CLIP_TEXT = "clip_text"
    T5_ENCODER = "t5_encoder"
    QWEN3 = "qwen3"
