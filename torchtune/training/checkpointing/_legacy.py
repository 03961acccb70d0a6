"""What copied recipes call: checkpoints as dicts of tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtune.models import Description, ModelSpec, get_spec, spec_for_architecture
from torchtune.training.checkpointing._directories import complete_directories, new_directory, prune
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._export import SAFETENSORS_INDEX, carry_files, save_tensors
from torchtune.training.checkpointing._load import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from torchtune.training.checkpointing._model_type import ADAPTER_CONFIG, ADAPTER_KEY, MODEL_KEY
from torchtune.training.checkpointing._sources import open_source, resolve_files, safe_torch_load, stream
from torchtune.utils import atomic_write, write_json

_RECIPE_STATE = "recipe_state.pt"
_ADAPTER_PT = "adapter_model.pt"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class LegacyInterface:
    """``load_checkpoint`` and ``save_checkpoint``: the whole model passes through a dict."""

    def load_checkpoint(self) -> dict[str, Any]:
        """Read ``checkpoint_dir`` into ``{"model": {our names: tensor}}``.

        With ``should_load_recipe_state``, the newest checkpoint of ``output_dir``: also its adapter and whatever its
        ``recipe_state.pt`` holds.

        Raises:
            CheckpointError: files are missing or corrupt, or the folder does not say what the model is.
        """
        latest = None
        if self.should_load_recipe_state:
            latest = self._latest()
        adapter = None if latest is None else latest / _ADAPTER_PT
        from_latest = latest is not None and not adapter.is_file()
        paths = (
            resolve_files(latest, None) if from_latest else resolve_files(self.checkpoint_dir, self.checkpoint_files)
        )
        source = open_source(paths)
        loaded: dict[str, Any] = {}
        if source.kind == "tune":
            loaded[MODEL_KEY] = dict(stream(source))
        else:
            spec, description = self._identity()
            loaded[MODEL_KEY] = dict(spec.weight_map(source.kind).to_tune(stream(source), description))
        if latest is not None:
            if adapter.is_file():
                loaded[ADAPTER_KEY] = safe_torch_load(adapter)
            loaded |= safe_torch_load(latest / _RECIPE_STATE, mmap=False)
        return loaded

    def save_checkpoint(
        self,
        state_dict: Mapping[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
        *,
        step: int | None = None,
        max_shard_size: str = "5GB",
        dir_prefix: str = "epoch",
    ) -> None:
        """Write ``epoch_N`` (or ``step_N``) from a dict.

        Args:
            state_dict: ``model`` (our names), optionally ``adapter`` and ``adapter_config``, and anything else that
                ``torch.load(weights_only=True)`` can read.
            epoch: N.
            intermediate_checkpoint: also write everything else as ``recipe_state.pt``.
            adapter_only: leave the model out.
            step: N where ``dir_prefix`` is ``"step"``.
            max_shard_size: like ``"5GB"``.
            dir_prefix: ``"epoch"`` or ``"step"``.

        Raises:
            CheckpointError: ``adapter_only`` without an adapter.
            UserError: the disk is full; what was saved before is untouched.
        """
        if adapter_only and ADAPTER_KEY not in state_dict:
            raise CheckpointError("save_checkpoint: adapter_only=True needs an adapter in the dict.")
        number = step if dir_prefix == "step" and step is not None else epoch
        with new_directory(self._output_dir(), f"{dir_prefix}_{number}") as folder:
            spec, description = self._identity()
            if not adapter_only:
                tensors = spec.weight_map("hf").to_external(state_dict[MODEL_KEY].items(), description)
                _write_shards(dict(tensors), folder, _bytes(max_shard_size))
                if (self.checkpoint_dir / "config.json").is_file():
                    (folder / "config.json").write_bytes((self.checkpoint_dir / "config.json").read_bytes())
            if ADAPTER_KEY in state_dict:
                _write_adapter(state_dict, folder, spec, description, self._base_name())
            carry_files(self.checkpoint_dir, folder)
            if intermediate_checkpoint:
                rest = {k: v for k, v in state_dict.items() if k not in (MODEL_KEY, ADAPTER_KEY, ADAPTER_CONFIG)}
                with atomic_write(folder / _RECIPE_STATE) as file:
                    torch.save(rest, file)
        prune(self._output_dir(), self.keep_last_n_checkpoints)

    def _latest(self) -> Path:
        found = complete_directories(self._output_dir())
        with_state = [path for path in found if (path / _RECIPE_STATE).is_file()]
        if not with_state:
            raise CheckpointError(f"{self._output_dir()} holds no checkpoint with a {_RECIPE_STATE} to resume from.")
        return with_state[-1]

    def _identity(self) -> tuple[ModelSpec, Description]:
        """What the checkpoint's ``config.json`` says the model is; ``model_type`` chooses among its families."""
        path = self.checkpoint_dir / "config.json"
        if not path.is_file():
            raise CheckpointError(f"There is no {path}: load_checkpoint needs it to know the model.")
        config = json.loads(path.read_text(encoding="utf-8"))
        spec = get_spec(self.model_type.value) if self.model_type else spec_for_architecture(config["architectures"][0])
        return spec, spec.from_hf_config(config)


def _bytes(size: str) -> int:
    for unit, factor in _UNITS.items():
        if size.upper().endswith(unit):
            return int(float(size[: -len(unit)]) * factor)
    raise CheckpointError(f"max_shard_size: '{size}' is no size, write it like 5GB.")


def _write_shards(tensors: dict[str, torch.Tensor], folder: Path, limit: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        if shards[-1] and size + length > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().contiguous().cpu()
        size += length
    if len(shards) == 1:
        save_tensors(shards[0], folder / "model.safetensors")
        return
    index = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, folder / name)
        index |= dict.fromkeys(shard, name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(folder / SAFETENSORS_INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _write_adapter(
    state_dict: Mapping[str, Any], folder: Path, spec: ModelSpec, description: Description, base_name: str
) -> None:
    adapter = {name: tensor.detach().cpu() for name, tensor in state_dict[ADAPTER_KEY].items()}
    with atomic_write(folder / _ADAPTER_PT) as file:
        torch.save(adapter, file)
    weight_map = spec.weight_map("hf")
    external = weight_map.peft().to_external(adapter.items(), description, partial=True)
    save_tensors({name: tensor.contiguous() for name, tensor in external}, folder / ADAPTER_FILE)
    if ADAPTER_CONFIG not in state_dict:
        return
    settings = dict(state_dict[ADAPTER_CONFIG])
    asked = set(settings["target_modules"])
    modules = [row.tune.removesuffix(".weight") for row in weight_map.rows if isinstance(row.tune, str)]
    names = {module.rpartition(".")[2]: module.format(layer=0) for module in modules}
    settings["target_modules"] = sorted(
        weight_map.external_module(names[name], description).rpartition(".")[2] for name in asked & names.keys()
    )
    write_json(
        folder / ADAPTER_CONFIG_FILE, {**settings, "base_model_name_or_path": base_name, "task_type": "CAUSAL_LM"}
    )
