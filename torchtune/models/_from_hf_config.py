"""Build a model from the ``config.json`` of its checkpoint."""

from collections.abc import Collection
from pathlib import Path

import torch

from torchtune.models._build import build
from torchtune.models._description import ModelError
from torchtune.models._hf_fields import architecture_of
from torchtune.models._parts import text_config
from torchtune.models._spec import spec_for_architecture
from torchtune.modules.transformer import TransformerDecoder
from torchtune.utils import read_json

_STORED = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def from_hf_config(
    checkpoint_dir: str | Path, ignore_fields: Collection[str] = (), images: bool = False
) -> TransformerDecoder:
    """Build a model from the ``config.json`` of a Hugging Face checkpoint, without its weights.

    For a composite model (vision, audio, text), only the text decoder is built, unless it cannot be used alone. The
    checkpointer copies the other parts unchanged.

    Args:
        checkpoint_dir: folder with ``config.json``, or the file itself.
        ignore_fields: fields of the file to skip.
        images: also build the vision tower of a composite model.

    Raises:
        ModelError: the file is missing or unreadable, the architecture is unknown, or a field has no equivalent in a
            description.

    Example:
        >>> with torch.device("meta"):
        ...     model = torchtune.models.from_hf_config(checkpoint)
        >>> model.spec.name
        'llama...'
    """
    path = Path(checkpoint_dir)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ModelError(f"There is no config.json in {checkpoint_dir}: give the folder of the checkpoint.")
    config = text_config(read_json(path, ModelError), images)
    architecture = architecture_of(config)
    if architecture is None:
        raise ModelError(f"{path} names no architecture (field 'architectures'): give the config.json of a checkpoint.")
    spec = spec_for_architecture(architecture)
    return build(spec.from_hf_config(config, ignore_fields), spec)


def stored_dtype(checkpoint_dir: str | Path | None) -> torch.dtype | None:
    """Return the dtype of a checkpoint's weights according to its ``config.json``.

    Args:
        checkpoint_dir: folder with ``config.json``.

    Returns:
        A floating-point dtype of 16 to 64 bits, or ``None`` if the file does not exist or names no such dtype.

    Raises:
        ModelError: the file is unreadable.

    Example:
        >>> torchtune.models.stored_dtype(checkpoint)
        torch.float32
    """
    if checkpoint_dir is None or not (path := Path(checkpoint_dir) / "config.json").is_file():
        return None
    config = text_config(read_json(path, ModelError))
    name = config.get("dtype", config.get("torch_dtype"))
    return _STORED.get(name) if isinstance(name, str) else None
