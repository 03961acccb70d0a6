"""Files of an export: find the checkpoint, and write the files."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchtune
from torchtune._cli._find_recipe import find_checkpoint
from torchtune._facade import load_to_save
from torchtune.checkpoints import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    CheckpointError,
    GGUFFile,
    ModelSource,
    adapter_folder,
    quantize_checkpoint,
)
from torchtune.data import RERANKER_FILE
from torchtune.models import from_hf_config
from torchtune.modules.low_precision.quantizers import (
    Float8Quantizer,
    GGUFQuantizer,
    Int4WeightOnlyQuantizer,
    Int8DynActInt4WeightQuantizer,
    Int8WeightOnlyQuantizer,
    quantizable_layers,
)
from torchtune.reports import RunFolder
from torchtune.tokenizers import go_template, hf_tokenizer
from torchtune.utils import FolderLock, UserError, read_json

# Files of an embedding model or a reranker, see extra_files of torchtune.rlhf.loss.
_EMBEDDING_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "2_Normalize/config.json",
    RERANKER_FILE,
)
# Ollama reserves memory for the whole context.
_MOST_CONTEXT = 8192


@dataclass(frozen=True)
class Trained:
    """A checkpoint to export.

    Attributes:
        checkpoint: folder of the checkpoint.
        adapter: folder of the adapter, if an adapter was trained.
        base: folder of the model before training, if it still exists.
        run: the run that saved the checkpoint, if its settings still exist.
    """

    checkpoint: Path
    adapter: Path | None
    base: Path | None
    run: RunFolder | None

    @property
    def path(self) -> Path:
        """Folder from which :func:`torchtune.load` reads the trained model."""
        return self.adapter or self.checkpoint

    @property
    def has_weights(self) -> bool:
        """Whether the checkpoint has all weights, after LoRA with the adapter merged."""
        return self.adapter is None or any(self.checkpoint.glob("model*.safetensors"))


def find_trained(model: str) -> Trained:
    """Find the checkpoint, its adapter and its base.

    Raises:
        UserError: there is no checkpoint, the run is still in progress, or the adapter's base is missing.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UserError(f"{model}: there is no such folder: give that of a run or of a checkpoint.")
    checkpoint = Path(find_checkpoint(str(folder)))
    if checkpoint != folder:  # a run in progress may delete its checkpoints
        FolderLock(folder, key="run").check_unused()
    run = None
    base = None
    with suppress(UserError):  # a checkpoint alone, without the settings of its run
        run = RunFolder(checkpoint.resolve())
        base = run.base
    adapter = None
    with suppress(CheckpointError):  # all weights were trained
        adapter = adapter_folder(checkpoint)
    if adapter is not None and (adapter / ADAPTER_CONFIG_FILE).is_file():
        base = Path(str(read_json(adapter / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")))
    if base is not None and not os.path.isdir(base):
        base = None  # it was deleted, or is the name of a repository
    return Trained(checkpoint, adapter, base, run)


def write_files(trained: Trained, to: str, quant: str | None, files: Path, merged: Path) -> None:
    """Write an export.

    Args:
        trained: the checkpoint.
        to: format.
        quant: kind of quantization.
        files: folder to write.
        merged: folder for merged weights that are deleted after quantization.
    """
    if to in ("hf", "adapter", "merged"):
        dtype = None
        if to == "adapter" and (trained.path / ADAPTER_FILE).is_file():  # may differ from the base's
            tensors = ModelSource(trained.path, [ADAPTER_FILE]).open()
            dtype = tensors.read(tensors.names()[0]).dtype
        model = load_to_save(trained.path, dtype)
        torchtune.save(model, files, contents="model" if to == "hf" else to)
        _copy_embedding_files(trained.checkpoint, files)
        return
    source = trained.checkpoint
    if not trained.has_weights:
        write_files(trained, "merged", None, merged, merged)
        source = merged
    model = quantize(source, quant, files)
    shutil.rmtree(merged, ignore_errors=True)
    if to == "ollama":
        _write_modelfile(files, model.description.max_seq_len)


def _copy_embedding_files(checkpoint: Path, files: Path) -> None:
    """Copy what ``sentence-transformers`` reads of an embedding model or reranker; an export may begin at the base."""
    if not (checkpoint / "modules.json").is_file():
        return
    for name in _EMBEDDING_FILES:
        if (checkpoint / name).is_file():
            (files / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(checkpoint / name, files / name)


def quantize(folder: Path, quant: str, files: Path) -> torch.nn.Module:
    """Quantize the weights in a folder; return their model, on the meta device."""
    with torch.device("meta"):
        model = from_hf_config(folder)
    quantize_checkpoint(ModelSource(folder), model, _quantizer(quant, model), files)
    return model


def _write_modelfile(files: Path, context: int) -> None:
    """Write Ollama's ``Modelfile`` beside the GGUF file: chat template, stop texts, and at most ``context`` tokens."""
    file = next(files.glob("*.gguf"))
    tokenizer = hf_tokenizer(str(files))
    # Ollama adds BOS by itself if the file says so; the template must not add another.
    adds_bos = bool(GGUFFile(file).get("tokenizer.ggml.add_bos_token"))
    lines = [
        f"FROM ./{file.name}",
        f'TEMPLATE """{go_template(tokenizer, adds_bos=adds_bos)}"""',
    ]
    for text, token_id in tokenizer.special_tokens.items():
        if token_id in tokenizer.stop_tokens:
            lines.append(f'PARAMETER stop "{text}"')
    lines.append(f"PARAMETER num_ctx {min(context, _MOST_CONTEXT)}")
    (files / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _quantizer(quant: str, model: torch.nn.Module) -> Any:
    """Return the quantizer of a kind of quantization, with a group size that fits all layers of the model."""
    if quant == "int8":
        return Int8WeightOnlyQuantizer()
    if quant == "fp8":
        return Float8Quantizer()
    if quant not in ("int4", "8da4w"):
        return GGUFQuantizer(quant.upper())
    widths = [layer.in_features for layer in quantizable_layers(model).values()]
    groupsize = 128  # if none fits, the quantizer names the layer that does not
    for size in (128, 64, 32):
        if all(width % size == 0 for width in widths):
            groupsize = size
            break
    if quant == "int4":
        return Int4WeightOnlyQuantizer(groupsize=groupsize)
    return Int8DynActInt4WeightQuantizer(groupsize=groupsize)
