"""Checkpointers that configs name: a :class:`CheckpointStore` of one model, with other arguments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtune.checkpoints._checkpoint_store import POLICY, CheckpointStore
from torchtune.checkpoints._export import MAX_SHARD_BYTES, shard_files
from torchtune.checkpoints._full_state_dicts import StateDictMethods
from torchtune.checkpoints._resume import ModelsOfRun, ResumePoint
from torchtune.checkpoints._save import ExistingTensor, check_trained_finite
from torchtune.checkpoints._small_files import save_tokenizer, write_extra_files
from torchtune.checkpoints._state import load_state, rank_state
from torchtune.checkpoints._weight_files import (
    SAFETENSORS_INDEX,
    CheckpointError,
    WeightFiles,
    find_files,
    open_weight_files,
)
from torchtune.tokenizers import SavableTokenizer
from torchtune.training.parallel import Ranks
from torchtune.utils import doing, write_json


class FullModelHFCheckpointer(CheckpointStore, StateDictMethods):
    """A :class:`CheckpointStore` of one model, with the arguments of configs.

    Hugging Face libraries can load its checkpoints. A recipe adds further models with :meth:`add_source`.

    Args:
        checkpoint_dir: folder of the weights, usually as downloaded, or a URL such as ``s3://bucket/model``; see
            :class:`ModelSource` for the formats.
        checkpoint_files: names of the weight files, or ``{filename_format, max_filename}``; found by default.
        model_type: name of a :class:`ModelType`; it must match the model.
        output_dir: folder of the checkpoints ``epoch_N`` and ``step_N``.
        adapter_checkpoint: initial adapter: a folder in PEFT's layout, a file in such a folder, or the
            ``adapter_model.pt`` of an older checkpoint; an absolute path, or relative to the working directory,
            ``checkpoint_dir`` or ``output_dir``.
        recipe_checkpoint: accepted for older configs; a resume finds the newest complete checkpoint.
        resume_from_checkpoint: accepted for older configs; the recipe's setting of the same name applies.
        safe_serialization: accepted for older configs; files are always safetensors.
        should_load_recipe_state: whether :meth:`load_checkpoint` reads the newest checkpoint in ``output_dir``.
        keep_last_n_checkpoints: number of checkpoints to keep. By default all ``epoch_N`` are kept, and the last three
            ``step_N``.
        upload: folder of an object store, such as ``s3://bucket/run``, to which every checkpoint is uploaded in the
            background; a run with an empty ``output_dir`` resumes from it.
        enable_dcp: accepted for older configs; every rank always reads and writes its own shard.
        text_only: export the text decoder of a multimodal checkpoint as a separate model. By default the other towers
            are exported with it, unchanged.

    Raises:
        CheckpointError: ``model_type`` or ``keep_last_n_checkpoints`` is invalid.

    Example:
        >>> output_dir = str(folder / "run")
        >>> checkpointer = torchtune.checkpoints.FullModelHFCheckpointer(str(checkpoint), output_dir=output_dir)
        >>> checkpointer.load_model(model)
        >>> path = checkpointer.save("epoch_0", model)
        >>> checkpointer.close()
    """

    _name_format = "hf"

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: Sequence[str] | Mapping[str, str] | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        adapter_checkpoint: str | None = None,
        recipe_checkpoint: str | None = None,
        resume_from_checkpoint: bool = False,
        safe_serialization: bool = True,
        should_load_recipe_state: bool = False,
        *,
        keep_last_n_checkpoints: int | None = None,
        upload: str | None = None,
        enable_dcp: bool = False,
        text_only: bool = False,
    ) -> None:
        source = {
            "checkpoint_dir": checkpoint_dir,
            "checkpoint_files": checkpoint_files,
            "adapter_checkpoint": adapter_checkpoint,
            "model_type": model_type,
            "text_only": text_only,
        }
        super().__init__({POLICY: source}, output_dir, keep_last_n_checkpoints=keep_last_n_checkpoints, upload=upload)
        self.should_load_recipe_state = should_load_recipe_state


class _EarlierFormatCheckpointer(CheckpointStore, StateDictMethods):
    """A checkpointer for files of an earlier format; see :class:`FullModelHFCheckpointer` for the arguments."""

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: Sequence[str] | Mapping[str, str] | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        adapter_checkpoint: str | None = None,
        recipe_checkpoint: str | None = None,
        resume_from_checkpoint: bool = False,
        should_load_recipe_state: bool = False,
        *,
        keep_last_n_checkpoints: int | None = None,
        upload: str | None = None,
    ) -> None:
        source = {
            "checkpoint_dir": checkpoint_dir,
            "checkpoint_files": checkpoint_files,
            "adapter_checkpoint": adapter_checkpoint,
            "model_type": model_type,
        }
        super().__init__({POLICY: source}, output_dir, keep_last_n_checkpoints=keep_last_n_checkpoints, upload=upload)
        self.should_load_recipe_state = should_load_recipe_state


class FullModelMetaCheckpointer(_EarlierFormatCheckpointer):
    """A checkpointer for Meta's consolidated files, kept for configs that name it.

    :meth:`save` writes Hugging Face's format; :meth:`save_checkpoint` writes one file with Meta's names.
    See :class:`FullModelHFCheckpointer` for the arguments.

    Example:
        >>> checkpointer = torchtune.checkpoints.FullModelMetaCheckpointer(
        ...     "/tmp/Llama-3.1-8B", ["consolidated.00.pth"], model_type="LLAMA3", output_dir="/tmp/run"
        ... )  # doctest: +SKIP
    """

    _name_format = "meta"


class FullModelTorchTuneCheckpointer(_EarlierFormatCheckpointer):
    """A checkpointer for files with this library's names, kept for configs that name it.

    :meth:`save` writes Hugging Face's format; :meth:`save_checkpoint` writes one file with this library's names.
    See :class:`FullModelHFCheckpointer` for the arguments.

    Example:
        >>> checkpointer = torchtune.checkpoints.FullModelTorchTuneCheckpointer(
        ...     "/tmp/run/epoch_0", ["model.pt"], model_type="LLAMA3", output_dir="/tmp/next"
        ... )  # doctest: +SKIP
    """

    _name_format = "tune"


Checkpointer = FullModelHFCheckpointer | FullModelMetaCheckpointer | FullModelTorchTuneCheckpointer


class ModuleCheckpointer(CheckpointStore):
    """Checkpoints of any ``nn.Module``: its state dict, buffers included, in ``model.safetensors``.

    For copied recipes that train a model of your own, on one process. Checkpoints have the completion marker, the
    training state and the exact resume of :class:`CheckpointStore`, and the names of ``module.state_dict()``, so that
    ``module.load_state_dict(safetensors.torch.load_file(path))`` reads them.

    Args:
        checkpoint_dir: folder of ``model.safetensors`` (or its shards) to begin with, such as a checkpoint of another
            run; None begins with the values of the module.
        output_dir: folder of the checkpoints ``epoch_N`` and ``step_N``.
        keep_last_n_checkpoints: number of checkpoints to keep. By default all ``epoch_N`` are kept, and the last three
            ``step_N``.

    Raises:
        CheckpointError: ``keep_last_n_checkpoints`` is below 1, or there are several processes.

    Example:
        >>> module = torch.nn.Linear(4, 2)
        >>> checkpointer = torchtune.checkpoints.ModuleCheckpointer(output_dir=folder / "run")
        >>> checkpointer.load_model(module)
        >>> path = checkpointer.save("epoch_0", module)
        >>> checkpointer.close()
        >>> again = torchtune.checkpoints.ModuleCheckpointer(path, output_dir=folder / "next")
        >>> again.load_model(torch.nn.Linear(4, 2))
    """

    def __init__(
        self,
        checkpoint_dir: str | Path | None = None,
        output_dir: str | Path | None = None,
        *,
        keep_last_n_checkpoints: int | None = None,
    ) -> None:
        super().__init__({}, output_dir, keep_last_n_checkpoints=keep_last_n_checkpoints)
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        if Ranks(CheckpointError).size > 1:
            raise CheckpointError("checkpointer: ModuleCheckpointer saves models of one process: start one.")

    def _source_folders(self) -> list[Path | None]:
        return [self.checkpoint_dir]

    def check_model(self, model: nn.Module, *, name: str = POLICY) -> None:
        """Check that the files of ``checkpoint_dir`` have the names and shapes of the module, without reading values.

        Raises:
            CheckpointError: see :meth:`load_model`.
        """
        if self.checkpoint_dir is not None:
            _open_checked(model, self.checkpoint_dir)

    @doing("loading the checkpoint")
    def load_model(
        self,
        model: nn.Module,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        name: str = POLICY,
        whole: bool = False,
    ) -> None:
        """Load the module from ``checkpoint_dir``, if there is one, and move it to ``device``.

        Args:
            model: the module, with its initial values.
            device: device of the module.
            dtype: dtype of floating-point parameters and buffers; unchanged by default.
            name: accepted for recipes; there is one model.
            whole: accepted for recipes; files must always have all tensors.

        Raises:
            CheckpointError: files are missing or corrupt, or do not fit the module; or a tensor has no values, because
                the module was built on the meta device.
        """
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_meta:
                raise CheckpointError(
                    f"model: '{key}' has no values: a module of your own is built on a real device, so remove "
                    'torch.device("meta") in setup_model of the recipe.'
                )
        model.to(device=device, dtype=dtype)
        if self.checkpoint_dir is not None:
            _load(model, self.checkpoint_dir)

    def check_contents(
        self, models: nn.Module, *, contents: Any = "model", resumable: bool = True, tokenizer: Any = None
    ) -> None:
        """Check before training that :meth:`save` can write the module's state dict.

        Args:
            models: the module.
            contents: accepted for recipes; the whole state dict is written.
            resumable: accepted for recipes; every checkpoint but the last can be resumed.
            tokenizer: see :meth:`save`.

        Raises:
            CheckpointError: a value of the state dict is not a tensor that a file can hold, or a trained parameter is
                not in it.
        """
        tensors = _state_dict(models)
        try:
            shard_files([ExistingTensor(key, tensor) for key, tensor in tensors.items()], MAX_SHARD_BYTES)
        except ValueError as error:
            raise CheckpointError(f"model: {error}") from error
        for key, parameter in models.named_parameters():
            if parameter.requires_grad and key not in tensors:
                raise CheckpointError(
                    f"model: '{key}' is trained, but is not in state_dict(), so that no checkpoint would hold it: "
                    "leave it there."
                )

    @doing("resuming")
    def resume(self, point: ResumePoint, models: nn.Module, state: Mapping[str, Any]) -> None:
        """Load module and training state of ``point``; see :meth:`CheckpointStore.resume`.

        Raises:
            CheckpointError: the checkpoint has another module, or belongs to another kind of run.
        """
        ModelsOfRun.read(point.path).check_trained([POLICY], point.path)
        self._saver.wait()
        _load(models, point.path)
        load_state(state, dict(models.named_parameters()), point.path, self._ranks.rank)

    def save(
        self,
        name: str,
        models: nn.Module,
        *,
        contents: Any = "model",
        state: Mapping[str, Any] | None = None,
        cfg: Any = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        async_save: bool = False,
        optional: bool = False,
        tokenizer: Any = None,
        extra_files: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write ``output_dir/name`` atomically; see :meth:`CheckpointStore.save` for the arguments.

        Args:
            name: ``epoch_N`` or ``step_N``.
            models: the module.
            contents: accepted for recipes; the whole state dict is written.
            state: training state for a resume; None for the last checkpoint of a run.
            cfg: settings of the run, saved as ``torchtune_config.yaml``.
            max_shard_bytes: maximum bytes of tensors per file.
            async_save: copy the tensors to host memory, and write them in the background.
            optional: on failure to write, log a warning and continue without this checkpoint.
            tokenizer: tokenizer that trained; its ``save_files(folder)``, if it has one, writes its files.
            extra_files: contents of further files of the checkpoint, by path: a text, or the content of a JSON file.

        Returns:
            The checkpoint folder.

        Raises:
            UserError: the state dict cannot be written, a trained parameter is NaN or infinite, or the disk is full or
                not writable.
        """
        self._saver.wait()
        trained = {}
        for parameter_name, parameter in models.named_parameters():
            if parameter.requires_grad:
                trained[parameter_name] = parameter
        check_trained_finite(name, trained, self._ranks)
        tensors = [ExistingTensor(key, tensor) for key, tensor in _state_dict(models).items()]
        files, index = shard_files(tensors, max_shard_bytes)

        def write_small_files(folder: Path) -> None:
            if index is not None:
                write_json(folder / SAFETENSORS_INDEX, index)
            if isinstance(tokenizer, SavableTokenizer):
                # The source is only for a message about its tokenizer; a module may have no source.
                save_tokenizer(tokenizer, [folder], self.checkpoint_dir or folder)
            write_extra_files(folder, extra_files or {})

        state_of_rank = None
        if state is not None:
            state_of_rank = rank_state(state, dict(models.named_parameters()), self._ranks)
        # Buffers may change in the next forward pass, so that the copy does not wait for an optimizer's step.
        return self._save(
            name,
            files,
            write_small_files,
            state_of_rank,
            ModelsOfRun(),  # the default: one model, which trains all its weights
            cfg=cfg,
            optimizers=[],
            async_save=async_save,
            optional=optional,
        )

    def save_quantized(self, name: str, model: nn.Module, quantizer: Any) -> Path:
        """Raise: layers of another library are not quantized here.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError("quantizer: a module of your own is not saved quantized: set it to null.")


def _state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's state dict. Raises ``CheckpointError`` for other values."""
    tensors = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"model: state_dict() has '{key}', a {type(value).__name__}: only tensors are saved, register it as a "
                "buffer."
            )
        tensors[key] = value.detach().contiguous()
    return tensors


def _open_checked(model: nn.Module, folder: Path) -> WeightFiles:
    """Open the weight files of a folder, whose tensors have the names and shapes of the module's state dict.

    Raises:
        CheckpointError: a name or a shape differs.
    """
    files = open_weight_files(find_files(folder))
    names = set(files.names())
    tensors = _state_dict(model)
    for key, tensor in tensors.items():
        if key not in names:
            raise CheckpointError(f"{folder}: it lacks '{key}' of the model: it was saved by another one.")
        shape = files.shape(key)
        if tuple(shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder}: '{key}' has the shape {list(shape)}, and {list(tensor.shape)} in the model: it was saved "
                "by another one."
            )
    unexpected = sorted(names - tensors.keys())
    if unexpected:
        raise CheckpointError(
            f"{folder}: it has '{unexpected[0]}', which is not in the model: it was saved by another one."
        )
    return files


@torch.no_grad()
def _load(model: nn.Module, folder: Path) -> None:
    """Copy the tensors of a folder into the module's state dict."""
    files = _open_checked(model, folder)
    # Into the existing tensors, which keep their device and dtype.
    model.load_state_dict(dict(files.stream()))
