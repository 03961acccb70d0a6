"""Trained and frozen models of a run, as recorded in its checkpoints."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtune import config
from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._model_source import ModelSource
from torchtune.checkpoints._state import MODELS, STATE_DIR, damage_named
from torchtune.utils import write_json

_ONE_MODEL = ("policy",)
REFERENCE = "reference"


@dataclass(frozen=True)
class ModelsOfRun:
    """Models of a run; nothing is recorded for a run with only a policy that trains all its weights.

    Attributes:
        trained: names of the models in checkpoints.
        frozen: ``{"folder": path, "files": fingerprint}`` of every other model, by name.
        bases: the same for the base weights of every model that is saved as an adapter, by name.
    """

    trained: tuple[str, ...] = _ONE_MODEL
    frozen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, trained: Iterable[str], sources: Mapping[str, ModelSource], adapted: Iterable[str] = ()
    ) -> "ModelsOfRun":
        """Describe the models of this run.

        Args:
            trained: names of the models that are saved.
            sources: sources of all models, by name.
            adapted: names of the models that are saved as adapters.
        """
        trained = tuple(trained)
        frozen = {name: _record(one, one.fingerprint) for name, one in sources.items() if name not in trained}
        bases = {name: _record(sources[name], sources[name].base_fingerprint) for name in adapted}
        return cls(trained, frozen, bases)

    @classmethod
    def read(cls, checkpoint: Path) -> "ModelsOfRun":
        """Read the models of the run that wrote a checkpoint. Raises ``CheckpointError`` if the record is damaged."""
        path = checkpoint / STATE_DIR / MODELS
        if not path.is_file():
            return cls()
        with damage_named(path):
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(tuple(content["trained"]), content["frozen"], content["bases"])

    def write(self, checkpoint: Path) -> None:
        """Record the models in a checkpoint."""
        if self.trained != _ONE_MODEL or self.frozen or self.bases:
            content = {"trained": list(self.trained), "frozen": self.frozen, "bases": self.bases}
            write_json(checkpoint / STATE_DIR / MODELS, content)

    def check_trained(self, names: Iterable[str], checkpoint: Path) -> None:
        """Raise ``CheckpointError`` unless the resuming run trains the same models."""
        for name in sorted(set(self.trained) ^ set(names)):
            has, lacks = ("the checkpoint", "this run") if name in self.trained else ("this run", "the checkpoint")
            raise CheckpointError(
                f"{checkpoint}: {has} has a trained model '{name}', {lacks} has none: resume with the saved "
                "torchtune_config.yaml."
            )

    def check_sources(self, sources: Mapping[str, ModelSource], checkpoint: Path) -> None:
        """Check that the resuming run has the same frozen models, and the same base weights below its adapters.

        Args:
            sources: sources of all models of the resuming run, by name.
            checkpoint: path for error messages.

        Raises:
            CheckpointError: a model is missing, is new, or has other weights.
        """
        for name, base in self.bases.items():
            if name in sources and sources[name].base_fingerprint != base["files"]:
                raise CheckpointError(
                    f"{checkpoint}: its adapter was trained on the weights in {base['folder']}, and those in "
                    f"{sources[name].checkpoint_dir} differ: set checkpointer.checkpoint_dir back, or start a new run "
                    "in another output_dir."
                )
        now = ModelsOfRun.of(self.trained, sources).frozen
        for name in sorted(now.keys() | self.frozen.keys()):
            if name not in now:
                what = (
                    f"was saved by a run with a '{name}' model ({self.frozen[name]['folder']}), and this run has none"
                )
            elif name not in self.frozen:
                what = f"was saved by a run without a '{name}' model, and this run has one ({now[name]['folder']})"
            elif now[name]["files"] != self.frozen[name]["files"]:
                what = (
                    f"was saved by a run whose '{name}' model was {self.frozen[name]['folder']}, and the weights in "
                    f"{now[name]['folder']} differ from it"
                )
            else:
                continue
            raise CheckpointError(
                f"{checkpoint} {what}: resume with the saved torchtune_config.yaml, or start a new run in another "
                "output_dir."
            )


def _record(source: ModelSource, files: list[list[int]]) -> dict[str, Any]:
    return {"folder": str(source.checkpoint_dir), "files": files}


def add_reference(checkpointer: Any, ref_checkpointer: Any, loss: Any) -> None:
    """Add a loss's reference model to the models of the run, so that a resume checks its weights.

    Without a checkpointer, the reference is the initial model: the policy's source.

    Args:
        checkpointer: checkpointer of the run.
        ref_checkpointer: component of the reference's checkpointer, or None.
        loss: component of the loss; its ``needs_reference`` decides whether a reference is added by default.

    Raises:
        UserError: a component cannot be instantiated.

    Example:
        >>> from torchtune.training import FullModelHFCheckpointer, add_reference
        >>> checkpointer = FullModelHFCheckpointer(str(checkpoint))
        >>> add_reference(checkpointer, None, {"_component_": "torchtune.rlhf.loss.DPOLoss"})
        >>> list(checkpointer.store.sources)
        ['policy', 'reference']
    """
    if ref_checkpointer is not None:
        checkpointer.add_source(REFERENCE, config.instantiate(ref_checkpointer))
    elif getattr(config.instantiate(loss), "needs_reference", False):
        checkpointer.add_source(REFERENCE, checkpointer)
