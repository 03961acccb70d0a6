"""Any checkpoint of a known architecture, without a builder of its own."""

import json
from collections.abc import Collection
from pathlib import Path

from torchtune.models._build import build
from torchtune.models._description import ModelError
from torchtune.models._hf_fields import text_config
from torchtune.models._spec import spec_for_architecture
from torchtune.modules.transformer import TransformerDecoder


def from_hf_config(checkpoint_dir: str | Path, ignore_fields: Collection[str] = ()) -> TransformerDecoder:
    """Build the model that the ``config.json`` of a Hugging Face checkpoint describes (without its weights).

    Of a model that also sees or hears it is the text tower: what is saved then is a model of text alone.

    Args:
        checkpoint_dir: folder that holds ``config.json``, or the file itself.
        ignore_fields: fields of the file not to look at.

    Raises:
        ModelError: no readable file, an unknown architecture, or a field that a description cannot express.
    """
    path = Path(checkpoint_dir)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"There is no config.json in {checkpoint_dir}: give the folder of the checkpoint.") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON ({error}): download it again.") from error
    config = text_config(config) if isinstance(config, dict) else config
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not architectures:
        raise ModelError(f"{path} names no architecture (field 'architectures'): it describes no checkpoint.")
    spec = spec_for_architecture(architectures[0])
    return build(spec.from_hf_config(config, ignore_fields), spec)
