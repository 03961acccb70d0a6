"""Read exported files in the libraries that they are for: transformers, peft and llama.cpp.

They are optional, and nothing else of this library imports them.
"""

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.evaluation._compare_models import Logits
from torchtune.evaluation._evaluation_error import EvaluationError
from torchtune.utils import hide_import_warnings, require


@dataclass(frozen=True)
class ReadModel:
    """A model that another library has loaded.

    Attributes:
        library: its name and version.
        logits: see :func:`torchtune.evaluation.compare_models`.
        unread: names of tensors that are unknown to the library, are missing, or have another shape.
    """

    library: str
    logits: Logits
    unread: list[str] = field(default_factory=list)


def missing_packages(*names: str) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in names if find_spec(name) is None]


@contextlib.contextmanager
def _reading(name: str, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield a library and its name and version; convert its errors, and hide its warnings and progress bars.

    Raises:
        EvaluationError: the library raises an error.
        UserError: it is not installed.
    """
    with hide_import_warnings("torchao"):
        module = require(name, extra="check", purpose="The check of an export")
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), hide_import_warnings("torchao"):
            warnings.simplefilter("ignore")
            yield module, f"{name} {module.__version__}"
    except Exception as error:  # of another library
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EvaluationError(f"{name} cannot read {path}: {said.rstrip('.')}.") from error


def read_with_transformers(folder: Path, device: torch.device, **options: Any) -> ReadModel:
    """Load a folder in Hugging Face's layout in float32.

    Args:
        folder: the folder.
        device: device of the model.
        options: of ``from_pretrained``, for example the name of a ``gguf_file``.

    Raises:
        UserError: see :func:`_reading`.
    """
    with _reading("transformers", folder) as (transformers, library):
        model, found = _load(transformers, folder, device, **options)
    unread = [*found["unexpected_keys"], *found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
    return ReadModel(library, _logits_of(model, device), unread)


def _load(transformers: Any, folder: Path | str, device: torch.device, **options: Any) -> tuple[nn.Module, Any]:
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
    model, found = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    return model.eval().to(device), found


def read_with_peft(folder: Path, device: torch.device) -> ReadModel:
    """Load an adapter on the base that it names, in float32.

    Args:
        folder: folder of the adapter.
        device: device of the model.

    Raises:
        UserError: see :func:`_reading`.
    """
    with _reading("transformers", folder) as (transformers, _), _reading("peft", folder) as (peft, library):
        base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
        model = peft.PeftModel.from_pretrained(_load(transformers, base, device)[0], folder).eval()
        found = peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(folder), device=str(device)))
    unread = [*found.unexpected_keys, *(name for name in found.missing_keys if ".lora_" in name)]
    return ReadModel(library, _logits_of(model, device), unread)


def read_with_llama_cpp(file: Path) -> ReadModel:
    """Load a GGUF file in llama.cpp, on the host. Raises ``UserError`` as :func:`read_with_peft` does."""
    with _reading("llama_cpp", file) as (llama_cpp, library):
        model = llama_cpp.Llama(str(file), logits_all=True, n_ctx=512, verbose=False)

    def logits(ids: Tensor) -> Tensor:
        model.reset()
        model.eval(ids.tolist())
        return torch.from_numpy(model.scores[: len(ids)].copy()).float()

    return ReadModel(library, logits)


def _logits_of(model: nn.Module, device: torch.device) -> Logits:
    def logits(ids: Tensor) -> Tensor:
        found = model(ids[None].to(device)).logits
        return (found[0] if found.dim() == 3 else found).float().cpu()

    return logits
