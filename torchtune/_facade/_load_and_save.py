"""Load a model and its tokenizer from a folder or the hub, and save a model in Hugging Face's layout."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchtune import checkpoints, training, utils
from torchtune._hub import find_folder
from torchtune.checkpoints import (
    MARKER,
    CheckpointError,
    CheckpointStore,
    Contents,
    ModelSource,
    ModelWeights,
    StreamedSource,
    adapter_conversion,
    adapter_folder,
    base_of_adapter,
    has_adapter,
    has_conversion_files,
    num_classes_of_adapter,
)
from torchtune.models import checkpoint_tokenizer, from_hf_config, stored_dtype
from torchtune.modules import BidirectionalAttention, TransformerDecoder, classifier_model
from torchtune.modules.conversion import Conversion, apply_conversions
from torchtune.modules.peft import owned_parameters
from torchtune.tokenizers import HuggingFaceModelTokenizer
from torchtune.training.parallel import Ranks, shard_for_inference
from torchtune.utils import UserError, fsync_directory

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True)
class Origin:
    """Source of a model's weights, and the checkpoint's tokenizer."""

    source: ModelSource
    tokenizer: Any


# The origin of each loaded model. A registry and not attributes, so that a copy or pickle of a model does not contain
# file paths.
ORIGINS: WeakKeyDictionary[nn.Module, Origin] = WeakKeyDictionary()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``, DataParallel and DistributedDataParallel wrappers."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    # The class of compiled modules is not asked for, because its package takes a second to import.
    if hasattr(model, "_orig_mod"):
        return unwrap(model._orig_mod)
    return model


def load(
    path: str | Path,
    *,
    adapter: str | Path | Conversion | Sequence[Conversion] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    images: bool = False,
    shards: Literal["layers", "parameters"] | None = None,
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
        shards: what torchrun's processes share of the model, so that none has all of its weights; by default each
            process has a model of its own. ``"layers"`` splits every layer (tensor parallel) if the model allows it,
            and otherwise shards parameters; ``"parameters"`` shards parameters (FSDP). All ranks then call the model,
            :mod:`torchtune.generation` and :mod:`torchtune.evaluation` together, with the same inputs.

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
    return _load(path, ModelSource, adapter=adapter, dtype=dtype, device=device, images=images, shards=shards)


def load_to_save(path: str | Path, dtype: torch.dtype | None = None) -> TransformerDecoder:
    """Load the model of a checkpoint to save it in another layout; its base weights stay in their files until then.

    Args:
        path: see :func:`load`.
        dtype: see :func:`load`.

    Raises:
        UserError: see :func:`load`.
    """
    model, _ = _load(path, StreamedSource, dtype=dtype, device="cpu")
    return model


def load_adapted_shard(
    model: TransformerDecoder,
    path: str | Path,
    adapter: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> TransformerDecoder:
    """Load an adapter for a model that processes share; both share the parameters of the base.

    A model that is already sharded gets no adapter any more: a new one is built, sharded and filled with the adapter,
    and its base weights are then those of ``model``, unless the adapter changes them. All ranks must call it.

    Args:
        model: from :func:`load` with ``shards="layers"``.
        path: see :func:`load`, as for ``model``.
        adapter: see :func:`load`.
        dtype: see :func:`load`, as for ``model``.
        device: see :func:`load`, as for ``model``.

    Raises:
        UserError: the layers of the model are not split, or see :func:`load`.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        raise UserError(
            "adapter: the layers of this model cannot be split over processes, and parameters that are gathered layer "
            "by layer are not shared by several models: merge the adapter with tune export, or serve it in one process."
        )
    adapted, _ = _load(path, StreamedSource, adapter=adapter, dtype=dtype, device=device, shards="layers")
    for name, parameter in list(adapted.named_parameters()):
        if parameter.is_meta:
            module_path, _, leaf = name.rpartition(".")
            adapted.get_submodule(module_path).register_parameter(leaf, model.get_parameter(name))
    return adapted


def _load(
    path: str | Path,
    source_type: type[ModelSource],
    *,
    adapter: str | Path | Conversion | Sequence[Conversion] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    images: bool = False,
    shards: Literal["layers", "parameters"] | None = None,
) -> tuple[TransformerDecoder, HuggingFaceModelTokenizer]:
    """Load a model and its tokenizer; see :func:`load`. ``source_type`` reads the weights."""
    # The folder of the base weights, and that of the adapter or of other parameters of conversions.
    folder, repo_id = find_folder(path)
    adapter_path: str | Path | None = None
    conversions: list[Conversion] = []
    if isinstance(adapter, str | Path):
        adapter_path = adapter
    elif isinstance(adapter, Sequence):
        conversions = list(adapter)
    elif adapter is not None:
        conversions = [adapter]

    # The path may be the folder of an adapter, with or without base weights beside it.
    if adapter_path is None and (has_adapter(folder) or has_conversion_files(folder)):
        # If the folder has parameters of conversions, the given conversions are those that added them.
        if conversions and not has_conversion_files(folder):
            raise CheckpointError(f"{path} holds an adapter: it cannot get another one, merge it into its base first.")
        adapter_path = folder
        if not _has_base_weights(folder):
            folder, repo_id = _find_base_model(folder)
    if not (folder / "config.json").is_file():  # without GGUF files either, _build_model raises
        gguf_files = sorted(folder.glob("*.gguf"))
        if gguf_files:
            raise CheckpointError(
                f"{path} holds a GGUF file alone: torchtune.checkpoints.gguf_to_hf({gguf_files[0].name!r}, folder) "
                "writes a folder to load."
            )
    adapter_dir = None
    if adapter_path is not None:
        adapter_root, _ = find_folder(adapter_path)
        adapter_dir = adapter_folder(adapter_root)
        if adapter_dir.parent.resolve() == folder.resolve():
            raise CheckpointError(f"adapter: the weights in {path} have {adapter_dir} merged in: give path alone.")

    # The model, converted before any weight exists.
    torch_device = utils.get_device(None if device is None else str(device))
    dtype_name = dtype
    if isinstance(dtype, torch.dtype):
        dtype_name = training.precision.DTYPE_NAMES.get(dtype, str(dtype))
    # By default, it is the dtype of the checkpoint if the device computes it fast.
    _, weight_dtype = training.choose_dtype(dtype_name, torch_device, stored_dtype(folder) or torch.float32)
    with training.set_default_dtype(weight_dtype), torch.device("meta"):
        model = _build_model(folder, adapter_dir, images=images)
        if adapter_dir is not None and has_adapter(adapter_dir):
            conversions = [adapter_conversion(model, adapter_dir), *conversions]
            # Training may have turned off the causal attention of the base.
            if model.description.is_causal and _attends_both_ways(adapter_dir):
                conversions.append(BidirectionalAttention())
        apply_conversions(model, conversions)
    if conversions:
        # Raises now for a parameter that save could not write.
        ModelWeights(model).check_names(exported=True)

    # The weights, read into the parameters, of which each rank may have a shard.
    adapter_checkpoint = None if adapter_dir is None else str(adapter_dir.resolve())
    source = source_type(folder, adapter_checkpoint=adapter_checkpoint, repo_id=repo_id)
    # The tokenizer comes first, because its errors need not wait for the weights.
    tokenizer = checkpoint_tokenizer(model, _tokenizer_folder(model, folder, adapter_dir))
    if shards is not None:
        shard_for_inference(model, torch_device, split_layers=shards == "layers")
    # The parameters of new conversions are not in the checkpoint.
    is_whole = adapter_dir is not None or not conversions
    CheckpointStore({"policy": source}).load_model(model, device=torch_device, whole=is_whole)
    training.fit_vocabulary(model, tokenizer)  # raises if the tokenizer has more tokens than the model
    ORIGINS[model] = Origin(source, tokenizer)  # for save, and to compare the tokenizer in generate
    return model.eval(), tokenizer


def _build_model(folder: Path, adapter_dir: Path | None, *, images: bool) -> TransformerDecoder:
    """Build the model of a folder, with a classification head if an adapter of a language model brings one."""
    num_classes = 0
    if adapter_dir is not None and has_adapter(adapter_dir):
        num_classes = num_classes_of_adapter(adapter_dir)
    # A base that is a classifier has a head of its own.
    if num_classes == 0 or from_hf_config(folder).description.is_classifier:
        return from_hf_config(folder, images=images)
    return classifier_model(num_classes, "torchtune.models.from_hf_config", checkpoint_dir=folder)


def adapted_copy(model: TransformerDecoder, path: str | Path) -> TransformerDecoder:
    """Copy a loaded model, with the LoRA adapter in a folder or repository.

    See :func:`torchtune.checkpoints.adapted_copy`.
    """
    folder, _ = find_folder(path)
    return checkpoints.adapted_copy(model, adapter_folder(folder))


def _has_base_weights(folder: Path) -> bool:
    """Return whether a folder holds a file of weights that is not an adapter's."""
    for pattern in _WEIGHTS:
        for file in folder.glob(pattern):
            if not file.name.startswith("adapter_"):
                return True
    return False


def _folders_of_adapter(adapter_dir: Path) -> list[Path]:
    """Return the folders with files of the training of an adapter."""
    if adapter_dir.name == "adapter":  # of a checkpoint of merged weights
        return [adapter_dir, adapter_dir.parent]
    return [adapter_dir]


def _attends_both_ways(adapter_dir: Path) -> bool:
    """Return whether an adapter was trained with attention in both directions, as ``config.json`` beside it says."""
    for folder in _folders_of_adapter(adapter_dir):
        if (folder / "config.json").is_file():
            return utils.read_json(folder / "config.json").get("is_causal") is False
    return False


def _tokenizer_folder(model: TransformerDecoder, folder: Path, adapter_dir: Path | None) -> Path:
    """Return the folder of the tokenizer that trained: an adapter's, if it has one, otherwise the model's."""
    if adapter_dir is None:
        return folder
    needed_files = ["tokenizer.json"]
    if model.spec.image_processor is not None:
        needed_files.append("config.json")  # the settings of the image processor
    for candidate in _folders_of_adapter(adapter_dir):
        if all((candidate / name).is_file() for name in needed_files):
            return candidate
    return folder


def _find_base_model(folder: Path) -> tuple[Path, str | None]:
    """Return folder and repository of an adapter's base model."""
    base = base_of_adapter(folder)
    try:
        return find_folder(base)
    except UserError as error:
        raise CheckpointError(
            f"The adapter in {folder} names a base that is not there: correct its base_model_name_or_path, or load the "
            f"base with adapter={folder}. {error}"
        ) from error


def save(
    model: nn.Module,
    path: str | Path,
    *,
    contents: Contents | None = None,
    base: str | Path | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> Path:
    """Save a model in Hugging Face's layout, with its tokenizer, chat template and generation config.

    ``transformers``, ``peft``, vLLM and :func:`load` read the folder. It is written atomically. In distributed training
    all ranks must call it.

    Args:
        model: from :func:`load`, or from a builder of :mod:`torchtune.models`; with its adapters.
        path: the folder.
        contents: ``"model"``, the weights without adapters; ``"adapter"``, in PEFT's layout, with one more file for
            each other conversion with parameters; ``"merged"``, the weights with the adapter merged in; ``("adapter",
            "merged")``, both. By default the adapter if the model has one, else the model.
        base: folder of the model's original checkpoint, from which small files are copied; by default the checkpoint
            that :func:`load` read.
        tokenizer: tokenizer that trained, which writes its files (:class:`~torchtune.tokenizers.SavableTokenizer`); by
            default the one that :func:`load` returned with the model, or else a copy of the base's files.
        overwrite: replace an existing folder; allowed only for one written by this function or a recipe.

    Returns:
        The folder.

    Raises:
        UserError: a trained parameter would not be saved, the folder is not empty and ``overwrite`` is False, the
            folder is the base's, the base is unknown, or the disk is full.

    Example:
        >>> model, tokenizer = torchtune.load(checkpoint, adapter=torchtune.modules.peft.LoRA(rank=2))
        >>> sorted(file.name for file in torchtune.save(model, folder / "adapter").glob("adapter*"))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model: a {type(model).__name__} cannot be saved: give the model itself.")
    model = unwrap(model)
    path = Path(path).expanduser()
    source = _find_source(model, base)
    if tokenizer is None and base is None:  # then _find_source has found the model in ORIGINS
        tokenizer = ORIGINS[model].tokenizer
    _check_path(path, source.checkpoint_dir, overwrite)
    if contents is None:
        contents = "adapter" if owned_parameters(model) else "model"
    ranks = Ranks(CheckpointError)
    temporary = path.with_name(f".{path.name}.saving")  # the same name on every rank
    store = CheckpointStore({"policy": source}, temporary)
    try:
        # A store only accepts names of epochs and steps; its folder is then renamed.
        written = store.save("epoch_0", model, contents=contents, tokenizer=tokenizer)
        ranks.run_on_rank_0(lambda: _replace_folder(written, path))
    finally:
        store.close()
        ranks.run_on_rank_0(lambda: shutil.rmtree(temporary, ignore_errors=True))
    return path


def _check_path(path: Path, base_folder: Path, overwrite: bool) -> None:
    """Raise if ``path`` overlaps with the base's folder, or holds files that may not be replaced."""
    new = path.resolve()
    base = base_folder.resolve()
    if new == base or new in base.parents or base in new.parents:
        raise CheckpointError(f"path: {path} and the base's folder {base} are inside each other: name another one.")
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if is_free:
        return
    if not overwrite:
        raise CheckpointError(f"path: {path} is there already: name a new folder, or give overwrite=True.")
    if not (path / MARKER).is_file():
        raise CheckpointError(
            f"path: {path} is there already, and it was not written by torchtune.save: name a new folder, or delete it "
            "yourself."
        )


def _replace_folder(written: Path, path: Path) -> None:
    """Rename ``written`` to ``path``; at any instant, the old or the new folder is complete."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(written, path)
    fsync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _find_source(model: nn.Module, base: str | Path | None) -> ModelSource:
    """Return the checkpoint that the small files come from: the given folder, or the one that was loaded."""
    if base is not None:
        folder = Path(base).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"base: there is no folder {base}: give the one that the model started from.")
        return ModelSource(folder)
    if model not in ORIGINS:
        raise CheckpointError(
            "base: this model was not made by torchtune.load, so that its tokenizer and chat template are not known: "
            "give the folder that it started from and, if it trained with another one, its tokenizer."
        )
    return ORIGINS[model].source
