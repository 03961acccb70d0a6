"""Files of a checkpoint without tensors: ``config.json``, the tokenizer's, and generation settings.

When a model is loaded, ``config.json`` is compared with it. An export has the config of the model that was trained, the
files of the tokenizer that trained, and copies of the source's other small files.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._directories import MARKER
from torchtune.checkpoints._model_weights import ModelWeights, spec_and_description
from torchtune.checkpoints._weight_files import CheckpointError, read_json
from torchtune.models import Description, ModelError, ModelSpec, spec_for_architecture, text_config, with_text_config
from torchtune.tokenizers import MISSING_TOKENIZER, SavableTokenizer, is_tokenizer_file
from torchtune.utils import get_logger, log_once, log_rank_zero, write_json

GENERATION_CONFIG = "generation_config.json"
# Files that are not copied from the source folder: weights, and files that an export writes itself.
_LEFT_BEHIND = (".pt", ".pth", ".bin", ".safetensors", ".gguf", ".ckpt", ".index.json", ".distcp", ".h5", ".tmp")
_WRITTEN_ANEW = ("config.json", "torchtune_config.yaml")
_RUN_FOLDERS = ("epoch_", "step_", "recipe_state")
_FOLDERS_OF_A_CHECKPOINT = ("state", "adapter", "logs", "__pycache__")
_MAX_CARRIED_BYTES = 100 * 2**20
# Fields of a description that the shapes of tensors do not determine.
_NOT_IN_SHAPES = ("rope_base", "rope_scaling", "norm_eps", "activation", "chunk")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_config(model: nn.Module, config_file: Path) -> None:
    """Check a checkpoint's ``config.json`` against the model, including fields that shapes do not determine.

    Raises:
        CheckpointError: the family has other weight names or another layout, or the numbers of heads differ.
    """
    if not config_file.is_file():
        return  # such as Meta's folders
    spec, _ = spec_and_description(model)
    try:
        is_composite = spec.builder is not None
        config = text_config(read_json(config_file), images=is_composite)
    except ModelError as error:
        raise CheckpointError(f"{config_file}: {error}") from error
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is not None and architecture not in spec.architectures:
        # Families that have the same weight map read each other's files; the config is then read as its own family's.
        try:
            config_spec = spec_for_architecture(architecture)
        except ModelError:
            config_spec = None
        if config_spec is None or config_spec.weight_maps.get("hf") != spec.weight_maps.get("hf"):
            raise CheckpointError(
                f"{config_file}: the checkpoint is a {architecture}, the model in the run's config is of the family "
                f"'{spec.name}' ({', '.join(spec.architectures)}): use a builder of the checkpoint's family."
            )
        spec = config_spec
    try:
        described = spec.from_hf_config(config)
    except ModelError as error:
        # Only a comparison is lost: the builder in the run's config describes the model.
        get_logger().warning(f"{config_file} is not compared with the model: {error}")
        return
    check_description(model, described, config_file)


def check_description(model: nn.Module, described: Description, path: Path | str) -> None:
    """Compare the fields of descriptions that shapes do not determine; log a warning if the model may differ.

    Args:
        model: the model of the run.
        described: the model that the checkpoint describes.
        path: file of the description, for messages.

    Raises:
        CheckpointError: the numbers of heads differ.
    """
    _, built = spec_and_description(model)
    if (described.num_heads, described.num_kv_heads) != (built.num_heads, built.num_kv_heads):
        raise CheckpointError(
            f"{path}: the checkpoint has {described.num_heads} heads ({described.num_kv_heads} of keys and values), "
            f"the model in the run's config {built.num_heads} ({built.num_kv_heads}): use the builder of this "
            "checkpoint."
        )
    for name in _NOT_IN_SHAPES:
        if getattr(described, name) != getattr(built, name):
            log_once(
                get_logger(),
                f"{path} says {name} = {getattr(described, name)}, the model in the run's config is built with "
                f"{getattr(built, name)}: the latter holds.",
                level=logging.WARNING,
            )


def config_of_model(weights: ModelWeights, source_dir: Path, *, is_text_decoder: bool) -> dict:
    """Return the contents of ``config.json``: the source's, updated where the model differs.

    Args:
        weights: weights of the model, which determines the description, the dtype and the vocabulary size.
        source_dir: folder of the source.
        is_text_decoder: whether the model is the text decoder of a multimodal source; the file then describes the
            composite model.
    """
    spec, description = weights.spec_and_description
    # The embedding of a composite model has a prefix.
    name = next(name for name in weights.base if name.endswith("tok_embeddings.weight"))
    embedding = weights.specs[name]  # [v, d]
    config = config_of(spec, description, embedding.shape[0], embedding.dtype, source_dir)
    if is_text_decoder:
        return with_text_config(read_json(source_dir / "config.json"), config)
    return config


def config_of(
    spec: ModelSpec, description: Description, vocab_size: int, dtype: torch.dtype, source_dir: Path | None
) -> dict:
    """Return the contents of a ``config.json``; see :func:`config_of_model`."""
    description = replace(description, vocab_size=vocab_size)
    is_composite = spec.builder is not None
    config = {}
    if source_dir is not None and (source_dir / "config.json").is_file():
        config = text_config(read_json(source_dir / "config.json"), is_composite)
    # A config that describes the model keeps the fields and spellings of its source.
    if not _describes(config, spec, description):
        # Drop fields with two spellings, which could contradict each other.
        for key in ("rope_parameters", "torch_dtype"):
            config.pop(key, None)
        longest = config.get("max_position_embeddings")
        config.update(spec.to_hf_config(description))
        if longest:  # the model may be built with a shorter one
            config["max_position_embeddings"] = longest
    config.pop("quantization_config", None)  # the export is not quantized
    configs = [config]
    if is_composite:
        configs += [config["text_config"], config["vision_config"]]
        config["text_config"]["vocab_size"] = vocab_size
    if not is_composite or "vocab_size" in config:  # some composite models repeat it
        config["vocab_size"] = vocab_size
    dtype_name = str(dtype).removeprefix("torch.")
    if "torch_dtype" not in config:  # the spelling of older files
        config["dtype"] = dtype_name
    for config_with_dtype in configs:
        for key in ("dtype", "torch_dtype"):
            if key in config_with_dtype:
                config_with_dtype[key] = dtype_name
    return config


def _describes(config: dict, spec: ModelSpec, description: Description) -> bool:
    """Return whether a config describes this model, apart from context length and dropout."""
    if not config:
        return False
    try:
        described = spec.from_hf_config(config)
    except ModelError:
        return False
    described = replace(
        described,
        vocab_size=description.vocab_size,
        max_seq_len=description.max_seq_len,
        attn_dropout=description.attn_dropout,
    )
    return described == description


def copy_small_files(source: Path, folder: Path, *, tokenizer: bool) -> None:
    """Copy the small files of a source into an export; see :meth:`ModelSource.carry_files`."""
    # Other folders, such as a folder of downloads with a GGUF file, may hold anything, also in folders below them.
    is_model_folder = (source / "config.json").is_file()
    other_models = []  # folders of the other models in a checkpoint of several
    if (source / MARKER).exists():
        other_models = [path.parent.name for path in source.glob("*/config.json")]
    paths = source.rglob("*") if is_model_folder else source.glob("*")
    for path in sorted(paths):
        relative = path.relative_to(source)
        target = folder / relative
        if _is_left_behind(relative) or relative.parts[0] in other_models or target.exists():
            continue  # the export has its own file under this name
        is_of_tokenizer = is_tokenizer_file(relative)
        if is_of_tokenizer and not tokenizer:
            continue
        if not is_model_folder and not is_of_tokenizer and path.name != GENERATION_CONFIG:
            continue
        if path.is_file() and path.stat().st_size <= _MAX_CARRIED_BYTES:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _is_left_behind(relative: Path) -> bool:
    """Return whether a file of the source is hidden, holds weights, belongs to a run, or is written by the export."""
    name = relative.name
    folder = relative.parts[0]
    return (
        any(part.startswith(".") for part in relative.parts)
        or folder.startswith(_RUN_FOLDERS)
        or (len(relative.parts) > 1 and folder in _FOLDERS_OF_A_CHECKPOINT)
        or name.endswith(_LEFT_BEHIND)
        or name.startswith(("adapter_config", "adapter_model", "adapter_conversions"))
        or str(relative) in _WRITTEN_ANEW
    )


def check_savable_tokenizer(tokenizer: Any) -> None:
    """Log a warning before a run if its tokenizer cannot write its files."""
    with TemporaryDirectory() as folder:
        reason = _write_tokenizer_files(tokenizer, Path(folder))
    if reason is not None:
        get_logger().warning(
            f"tokenizer: {reason}, so checkpoints will hold no tokenizer: give it a method save_files(folder), which "
            "writes tokenizer.json and tokenizer_config.json."
        )


def save_tokenizer(tokenizer: Any, folders: Sequence[Path], source: Path) -> None:
    """Write the files of a tokenizer into folders of a checkpoint.

    If it cannot write them, ``TOKENIZER_MISSING.md`` explains it in each folder: the source's tokenizer may differ.

    Args:
        tokenizer: tokenizer that trained.
        folders: existing folders without tokenizer files.
        source: folder of the base weights.
    """
    # Into a temporary folder first: a tokenizer that fails may have written some of its files.
    with TemporaryDirectory(dir=folders[0]) as name:
        temporary = Path(name)
        reason = _write_tokenizer_files(tokenizer, temporary)
        if reason is None:
            files = [path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file()]
            for folder in folders:
                for file in files:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(temporary / file, folder / file)
            return
    get_logger().warning(f"The checkpoint holds no tokenizer, {MISSING_TOKENIZER} in it says more: {reason}.")
    for folder in folders:
        (folder / MISSING_TOKENIZER).write_text(
            f"""This checkpoint holds no tokenizer: {reason}.

The tokenizer files of {source} are not copied, because the model may have been trained with other tokens or another
chat template. If they are those that trained, copy them here. For checkpoints with a tokenizer, give the class a
method `save_files(folder)`, which writes `tokenizer.json` and `tokenizer_config.json`.
""",
            encoding="utf-8",
        )


def _write_tokenizer_files(tokenizer: Any, folder: Path) -> str | None:
    """Write the tokenizer's files; return the reason if it cannot."""
    name = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    if not isinstance(tokenizer, SavableTokenizer):
        return f"the tokenizer {name} has no method save_files"
    try:
        tokenizer.save_files(folder)
    except OSError:
        raise  # the disk is full or not writable
    except Exception as error:  # noqa: BLE001 - code of a user's own must not cost a checkpoint
        return f"the tokenizer {name} raised {type(error).__name__} in save_files ({error})"
    return None


def add_pad_token(tokenizer: Any, folder: Path) -> None:
    """Set ``pad_token_id`` of a classifier's ``config.json``, and ``pad_token`` of its tokenizer, if they have none.

    ``transformers`` reads the head at the last token that is no padding, and refuses batches of a model without a
    padding token. An EOS token is none: a text may end with it, and would be read one token earlier. For a tokenizer
    that pads with it, another special token is taken, one that no text ends with.

    Args:
        tokenizer: tokenizer that trained.
        folder: folder of a model in a checkpoint, with its ``config.json``.
    """
    # Optional attributes: a tokenizer of a user's own may have none of them.
    pad_id = getattr(tokenizer, "pad_id", None)
    special_tokens = getattr(tokenizer, "special_tokens", {})
    config = read_json(folder / "config.json")
    if pad_id is None or config.get("pad_token_id") is not None:
        return
    if pad_id == getattr(tokenizer, "eos_id", None):
        pad_id = _token_without_text(tokenizer, special_tokens)
        if pad_id is None:
            log_rank_zero(
                get_logger(),
                f"{folder}: config.json has no pad_token_id, because the tokenizer has no other special token than "
                "those that end a text: transformers reads the classifier in batches of one text only.",
                logging.WARNING,
            )
            return
    write_json(folder / "config.json", {**config, "pad_token_id": pad_id})
    pad_tokens = [text for text, token_id in special_tokens.items() if token_id == pad_id]
    if not pad_tokens:
        return
    # The files of the tokenizer must agree with config.json.
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if not path.is_file():
            continue
        settings = read_json(path)
        # The second file need not list the token, and is changed only where its entry would contradict.
        if settings and (name == "tokenizer_config.json" or "pad_token" in settings):
            write_json(path, {**settings, "pad_token": pad_tokens[0]})


def _token_without_text(tokenizer: Any, special_tokens: Mapping[str, int]) -> int | None:
    """Return a special token that no text ends with: for padding, reserved, unknown or BOS; None if there is none."""
    endings = {getattr(tokenizer, "eos_id", None), *getattr(tokenizer, "stop_tokens", ())}
    candidates = {text: token_id for text, token_id in special_tokens.items() if token_id not in endings}
    for word in ("pad", "reserved", "unused", "unk"):
        for text, token_id in candidates.items():
            if word in text.lower():
                return token_id
    bos_id = getattr(tokenizer, "bos_id", None)
    if bos_id in candidates.values():
        return bos_id
    return None


def add_stop_tokens(tokenizer: Any, folder: Path) -> None:
    """Add the tokens that end a turn to ``eos_token_id`` of the folder's ``generation_config.json``.

    ``transformers`` and vLLM stop at any token of this list. A missing file is created with the token ids of
    ``config.json``, from which ``transformers`` takes them otherwise.

    Args:
        tokenizer: tokenizer that trained.
        folder: folder of a model in a checkpoint, with its ``config.json``.
    """
    path = folder / GENERATION_CONFIG
    if path.is_file():
        settings = read_json(path)
    else:
        config = read_json(folder / "config.json")
        config.update(config.get("text_config", {}))  # of a composite model, where the ids may be
        settings = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
    published = settings.get("eos_token_id")
    if published is None:
        published = []
    elif not isinstance(published, list):
        published = [published]
    # Optional attributes: a tokenizer of a user's own may have neither.
    stop_tokens = getattr(tokenizer, "stop_tokens", ())
    turn_ends = getattr(tokenizer, "turn_ends", ())
    stops = list(dict.fromkeys([*published, *stop_tokens, *turn_ends]))  # once each
    # A file that lists the tokens already stays as it is.
    if stops and (stops != published or not path.is_file()):
        settings["eos_token_id"] = stops if len(stops) > 1 else stops[0]
        write_json(path, settings)


def write_extra_files(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write texts, and contents of JSON files, by path in a checkpoint's folder."""
    for path, content in contents.items():
        (folder / path).parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            (folder / path).write_text(content, encoding="utf-8")
        else:
            write_json(folder / path, content)
