"""A checkpoint's model and tokenizer, to generate with."""

from pathlib import Path
from typing import Any

import torch

from torchtune import training, utils
from torchtune.models import from_hf_config
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.transformer import TransformerDecoder
from torchtune.modules.transforms.tokenizers import hf_tokenizer
from torchtune.training.checkpointing._adapter import adapter_conversion, adapter_folder


def load_model(
    folder: str | Path,
    *,
    adapter: str | Path | None = None,
    device: str | None = None,
    dtype: str = "bf16",
) -> tuple[TransformerDecoder, Any]:
    """Load the model and the tokenizer of a checkpoint in Hugging Face's layout.

    Args:
        folder: of the checkpoint.
        adapter: folder of a LoRA adapter of that model, or of a checkpoint that contains one; its rank and target
            modules are read from it.
        device: cuda, cpu, mps …; by default the best one.
        dtype: of weights and activations, ``bf16`` or ``fp32``.

    Returns:
        The model, on the device, and its tokenizer.

    Raises:
        ModelError: the architecture is unknown.
        CheckpointError: files are missing or damaged, or the adapter is of another model.
    """
    target = utils.get_device(device)
    weights = training.get_dtype(dtype, device=target)
    tokenizer = hf_tokenizer(folder)
    found = None if adapter is None else adapter_folder(Path(adapter))
    with training.set_default_dtype(weights), torch.device("meta"):
        model = from_hf_config(folder)
        if found is not None:
            apply_conversions(model, [adapter_conversion(model, found)])
    source = training.FullModelHFCheckpointer(
        str(folder), adapter_checkpoint=None if found is None else str(found.resolve())
    )
    source.load_model(model, device=target)
    return model, tokenizer
