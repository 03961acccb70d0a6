"""Checkpointers for configs and copied recipes: a :class:`CheckpointStore` with other arguments."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtune.checkpoints._checkpoint_store import POLICY, CheckpointStore
from torchtune.checkpoints._legacy import LegacyInterface


class FullModelHFCheckpointer(LegacyInterface):
    """A :class:`CheckpointStore` of one model, with the arguments of configs.

    Hugging Face libraries can load its checkpoints. A recipe adds further models with :meth:`add_source`.

    Args:
        checkpoint_dir: folder of the weights, usually as downloaded; see :class:`ModelSource` for the formats.
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
        enable_dcp: accepted for older configs; every rank always reads and writes its own shard.
        text_only: export the text decoder of a multimodal checkpoint as a separate model. By default the other towers
            are exported with it, unchanged.

    Raises:
        CheckpointError: ``model_type`` or ``keep_last_n_checkpoints`` is invalid.

    Example:
        >>> checkpointer = torchtune.training.FullModelHFCheckpointer(str(checkpoint), output_dir=str(folder / "run"))
        >>> checkpointer.load_model(model)
        >>> path = checkpointer.save("epoch_0", model)
        >>> checkpointer.close()
    """

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
        super().__init__({POLICY: source}, output_dir, keep_last_n_checkpoints=keep_last_n_checkpoints)
        self.should_load_recipe_state = should_load_recipe_state

    @property
    def store(self) -> CheckpointStore:
        """This object, as the store of all models."""
        return self

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the policy's weights."""
        return self.source().checkpoint_dir


class FullModelMetaCheckpointer(FullModelHFCheckpointer):
    """A :class:`FullModelHFCheckpointer` for Meta's consolidated files, kept for configs that name it.

    :meth:`save` writes Hugging Face's format; :meth:`save_checkpoint` writes one file with Meta's names.
    See :class:`FullModelHFCheckpointer` for the arguments.

    Example:
        >>> checkpointer = torchtune.training.FullModelMetaCheckpointer(
        ...     "/tmp/Llama-3.1-8B", ["consolidated.00.pth"], model_type="LLAMA3", output_dir="/tmp/run"
        ... )  # doctest: +SKIP
    """

    _legacy_names = "meta"

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
    ) -> None:
        super().__init__(
            checkpoint_dir,
            checkpoint_files,
            model_type,
            output_dir,
            adapter_checkpoint,
            recipe_checkpoint,
            resume_from_checkpoint,
            should_load_recipe_state=should_load_recipe_state,
            keep_last_n_checkpoints=keep_last_n_checkpoints,
        )


class FullModelTorchTuneCheckpointer(FullModelMetaCheckpointer):
    """A :class:`FullModelHFCheckpointer` for files with this library's names.

    :meth:`save` writes Hugging Face's format; :meth:`save_checkpoint` writes one file with this library's names.
    See :class:`FullModelHFCheckpointer` for the arguments.

    Example:
        >>> checkpointer = torchtune.training.FullModelTorchTuneCheckpointer(
        ...     "/tmp/run/epoch_0", ["model.pt"], model_type="LLAMA3", output_dir="/tmp/next"
        ... )  # doctest: +SKIP
    """

    _legacy_names = "tune"


Checkpointer = FullModelHFCheckpointer | FullModelMetaCheckpointer | FullModelTorchTuneCheckpointer
