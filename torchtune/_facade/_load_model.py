"""Load a model and its tokenizer from a folder or the hub."""

import os
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from torchtune import training, utils
from torchtune._facade._origin import ORIGINS, Origin
from torchtune._hub import download
from torchtune.checkpoints import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    OWNED_INDEX,
    CheckpointError,
    CheckpointStore,
    ModelSource,
    ModelWeights,
    adapter_conversion,
    adapter_folder,
    add_new_tokens,
    changes_base,
    load_adapter,
)
from torchtune.models import checkpoint_tokenizer, from_hf_config, stored_dtype
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import Conversion, apply_conversions
from torchtune.modules.peft import adapter_modules
from torchtune.tokenizers import HuggingFaceModelTokenizer
from torchtune.utils import UserError, read_json

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def load(
    path: str | Path,
    *,
    adapter: str | Path | Conversion | Sequence[Conversion] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    images: bool = False,
) -> tuple[TransformerDecoder, HuggingFaceModelTokenizer]:
    """Load the model and the tokenizer of a checkpoint.

    The model is in evaluation mode: call ``model.train()`` before training. At most one shard file is in host memory at
    a time. In distributed training all ranks must call it.

    Args:
        path: folder of a checkpoint, downloaded or trained, or a repository on the hub, ``"owner/name"``, which is
            downloaded into the hub's cache. For a folder with only an adapter, the base in its
            ``adapter_config.json`` is loaded, too.
        adapter: folder or repository of a LoRA adapter for that model, loaded with its rank and target modules, and
            trainable. Or one or several conversions, such as :class:`torchtune.modules.peft.LoRA`, applied before the
            weights are loaded: new adapters start untrained. If ``path`` contains parameters of a custom conversion,
            pass that conversion.
        dtype: dtype of the weights, ``"bf16"``, ``"fp32"`` or a floating ``torch.dtype``; by default the one in
            ``config.json``, or float32 if there is none or the device only emulates it.
        device: device of the model; by default the best one.
        images: load the vision tower, too, of a model whose text decoder can be used alone.

    Returns:
        The model and the tokenizer, with the checkpoint's chat template: the adapter's if its folder has one. For a
        model with image tokens it is a :class:`torchtune.models.ImageTextTransform`, which also processes images.

    Raises:
        UserError: there is no such folder or repository, the architecture or the quantization of the weights is
            unknown, files are missing or damaged, the adapter is for another model or already merged into the weights,
            or the tokenizer has more tokens than the model.

    Example:
        >>> model, tokenizer = torchtune.load(checkpoint, dtype="fp32", device="cpu")
        >>> model(torch.tensor([tokenizer.encode("the cat", add_eos=False)])).shape[-1] == tokenizer.vocab_size
        True
    """
    folder, repo_id = _find_folder(path)
    place, conversions = (adapter, []) if isinstance(adapter, str | Path) else (None, adapter)
    conversions = list(conversions) if isinstance(conversions, Sequence) else [conversions] if conversions else []
    if place is None and (_has_adapter(folder) or (folder / OWNED_INDEX).is_file()):
        if conversions and not (folder / OWNED_INDEX).is_file():
            raise CheckpointError(f"{path} holds an adapter: it cannot get another one, merge it into its base first.")
        place = folder
        if all(file.name.startswith("adapter_") for pattern in _WEIGHTS for file in folder.glob(pattern)):
            folder, repo_id = _find_base_model(folder)
    if not (folder / "config.json").is_file() and (files := sorted(folder.glob("*.gguf"))):
        raise CheckpointError(
            f"{path} holds a GGUF file alone: torchtune.checkpoints.gguf_to_hf({files[0].name!r}, folder) "
            "writes a folder to load."
        )
    adapter_dir = None
    if place is not None:
        adapter_dir = adapter_folder(_find_folder(place)[0])
        if adapter_dir.parent.resolve() == folder.resolve():
            raise CheckpointError(f"adapter: the weights in {path} have {adapter_dir} merged in: give path alone.")
    chosen = utils.get_device(None if device is None else str(device))
    with training.set_default_dtype(_choose_dtype(dtype, folder, chosen)), torch.device("meta"):
        model = from_hf_config(folder, images=images)
        if adapter_dir is not None and _has_adapter(adapter_dir):
            conversions = [adapter_conversion(model, adapter_dir), *conversions]
        apply_conversions(model, conversions)
    if conversions:
        ModelWeights(model).check_names(exported=True)
    where = None if adapter_dir is None else str(adapter_dir.resolve())
    source = ModelSource(folder, adapter_checkpoint=where, repo_id=repo_id)
    tokenizer = checkpoint_tokenizer(model, _tokenizer_folder(model, folder, adapter_dir))
    CheckpointStore({"policy": source}).load_model(
        model, device=chosen, whole=adapter_dir is not None or not conversions
    )
    training.fit_vocabulary(model, tokenizer)
    ORIGINS[model] = Origin(source, tokenizer)
    return model.eval(), tokenizer


def adapted_copy(model: TransformerDecoder, path: str | Path) -> TransformerDecoder:
    """Copy a model, with a LoRA adapter; the copy shares the parameters that the adapter does not change.

    Args:
        model: a loaded model.
        path: folder or repository of the adapter.

    Raises:
        CheckpointError: files are missing or damaged, or the adapter is for another model.
    """
    folder = adapter_folder(_find_folder(path)[0])
    copy = deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    apply_conversions(copy, [adapter_conversion(copy, folder)])
    if changes_base(folder):
        for _, layer in adapter_modules(copy):
            layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    add_new_tokens(copy, folder / ADAPTER_FILE)
    load_adapter(ModelWeights(copy), folder / ADAPTER_FILE, model.tok_embeddings.weight.device)
    return copy.eval()


def _find_folder(path: str | Path) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint, and its repository if it comes from the hub."""
    # os.path answers where pathlib raises: for a path that is too long, or a home of nobody.
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):
        return folder, None
    if os.path.exists(folder):
        raise UserError(f"{path} is a file: give the folder of the checkpoint.")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or str(path).startswith("."):
        raise UserError(f"{path!s:.200}: there is no such folder, and a repository of the hub is called owner/name.")
    try:
        return download(str(path)), str(path)
    except UserError as error:
        raise UserError(f"There is no folder {path!s:.200}, and the hub does not give it: {error}") from error


def _tokenizer_folder(model: TransformerDecoder, folder: Path, adapter_dir: Path | None) -> Path:
    """Return the folder of the tokenizer that trained: an adapter's, if it has one, otherwise the model's."""
    if adapter_dir is None:
        return folder
    candidates = [adapter_dir]
    if adapter_dir.name == "adapter":  # of a checkpoint of merged weights
        candidates.append(adapter_dir.parent)
    # A transform of images needs the settings of the image processor, too.
    needed = ["tokenizer.json"] if model.spec.image_processor is None else ["tokenizer.json", "config.json"]
    complete = [path for path in candidates if all((path / name).is_file() for name in needed)]
    return complete[0] if complete else folder


def _has_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_FILE).is_file() and (folder / ADAPTER_CONFIG_FILE).is_file()


def _find_base_model(folder: Path) -> tuple[Path, str | None]:
    """Return folder and repository of an adapter's base model."""
    file = folder / (ADAPTER_CONFIG_FILE if _has_adapter(folder) else OWNED_INDEX)
    base = read_json(file, CheckpointError).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{file} names no base (base_model_name_or_path): load the base with adapter={folder}.")
    try:
        return _find_folder(base)
    except UserError as error:
        raise CheckpointError(
            f"{file} names a base that is not there: correct its base_model_name_or_path, or load the base with "
            f"adapter={folder}. {error}"
        ) from error


def _choose_dtype(asked: str | torch.dtype | None, folder: Path, device: torch.device) -> torch.dtype:
    name = training.precision.DTYPE_NAMES.get(asked, str(asked)) if isinstance(asked, torch.dtype) else asked
    return training.choose_dtype(name, device, stored_dtype(folder) or torch.float32)[1]
