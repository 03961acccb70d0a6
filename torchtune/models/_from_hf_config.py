"""Build a model from the ``config.json`` of its checkpoint."""

from collections.abc import Collection
from pathlib import Path

from torchtune.models._build import build
from torchtune.models._description import ModelError
from torchtune.models._hf_fields import architecture_of
from torchtune.models._parts import text_config
from torchtune.models._spec import spec_for_architecture
from torchtune.modules.transformer import TransformerDecoder
from torchtune.utils import read_json


def from_hf_config(checkpoint_dir: str | Path, ignore_fields: Collection[str] = ()) -> TransformerDecoder:
    """Build a model from the ``config.json`` of a Hugging Face checkpoint, without its weights.

    For a composite model (vision, audio, text), build the text decoder. The checkpointer writes the other parts back
    unchanged.

    Args:
        checkpoint_dir: folder with ``config.json``, or the file itself.
        ignore_fields: fields of the file to skip.

    Raises:
        ModelError: the file is missing or unreadable, the architecture is unknown, or a description cannot express a
            field.

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
    config = text_config(read_json(path, ModelError))
    architecture = architecture_of(config)
    if architecture is None:
        raise ModelError(f"{path} names no architecture (field 'architectures'): give the config.json of a checkpoint.")
    spec = spec_for_architecture(architecture)
    return build(spec.from_hf_config(config, ignore_fields), spec)
