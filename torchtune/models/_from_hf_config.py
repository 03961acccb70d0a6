"""Any checkpoint of a known architecture, without a builder of its own."""

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
    """Build the model that the ``config.json`` of a Hugging Face checkpoint describes (without its weights).

    Of a model with several parts (vision, audio, text) it is the text decoder. A checkpointer writes the other parts
    back unchanged.

    Args:
        checkpoint_dir: folder that holds ``config.json``, or the file itself.
        ignore_fields: fields of the file to skip.

    Raises:
        ModelError: no readable file, an unknown architecture, or a field that a description cannot express.
    """
    path = Path(checkpoint_dir)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ModelError(f"There is no config.json in {checkpoint_dir}: give the folder of the checkpoint.")
    config = text_config(read_json(path, ModelError))
    architecture = architecture_of(config)
    if architecture is None:
        raise ModelError(f"{path} names no architecture (field 'architectures'): it describes no checkpoint.")
    spec = spec_for_architecture(architecture)
    return build(spec.from_hf_config(config, ignore_fields), spec)
