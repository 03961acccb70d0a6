"""Full state dicts of sharded models, for recipes copied from earlier releases.

Checkpointers load and save sharded models (``load_model``, ``save``, ``resume``) and never hold a full model. Older
recipes pass full state dicts around; these functions convert between the two, one tensor at a time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from torchtune.checkpoints import CheckpointError, ModelWeights
from torchtune.modules.peft import get_adapter_params
from torchtune.training.parallel import full_tensor, read_shard, reshard

# Replaces a file in error messages.
_DICT = Path("state dict")


@torch.no_grad()
def load_from_full_model_state_dict(
    model: nn.Module,
    full_sd: dict[str, Any],
    device: torch.device,
    strict: bool = False,
    cpu_offload: bool = False,
    use_distributed_state_dict: bool = False,
    release_sd: bool = True,
) -> _IncompatibleKeys:
    """Copy a full state dict into a model, sharded or not; every rank copies its own shard.

    Parameters on the meta device are materialized; the model's dtype does not change.

    Args:
        model: model on the meta device or materialized.
        full_sd: full tensors by this library's parameter names; may cover a part of the model.
        device: device of materialized parameters.
        strict: raise if names in ``full_sd`` are missing or unexpected.
        cpu_offload: place parameters in host memory instead of ``device``.
        use_distributed_state_dict: accepted and ignored.
        release_sd: replace each tensor in ``full_sd`` by None after copying it, to free host memory.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``nn.Module.load_state_dict``.

    Raises:
        RuntimeError: ``strict`` is set and the names differ.
        CheckpointError: a tensor has another shape than its parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    missing = [name for name in names if name not in full_sd]
    unexpected = sorted(full_sd.keys() - set(names))
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"The state dict does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}."
        )
    reshard(model)
    target = torch.device("cpu") if cpu_offload else torch.device(device)
    weights = ModelWeights(model)
    for name in names:
        if name in full_sd:
            weights.load(name, full_sd[name], _DICT, target)
            if release_sd:
                full_sd[name] = None
    return _IncompatibleKeys(missing, unexpected)


@torch.no_grad()
def gather_cpu_state_dict(
    model: nn.Module, is_rank_zero: bool, device: torch.device | None = None, adapter_weights_only: bool = False
) -> dict[str, Any]:
    """Gather the full state dict of a sharded model in rank 0's host memory. All ranks call it.

    Args:
        model: sharded or not.
        is_rank_zero: whether this rank receives the tensors.
        device: device on which shards in host memory are gathered; required if the process group has no CPU backend.
        adapter_weights_only: only gather the adapter's parameters.

    Returns:
        Full tensors on the CPU by parameter name; empty on all ranks but 0.
    """
    reshard(model)
    tensors = model.state_dict()
    names = list(tensors)
    if adapter_weights_only:
        adapter_params = get_adapter_params(model)
        names = [name for name in names if name in adapter_params]
    gathered = {}
    for name in names:
        # A collective: all ranks call it, in the order of the state dict.
        gathered_tensor = _gather(tensors[name], device)
        if is_rank_zero:
            gathered[name] = gathered_tensor.cpu()
    return gathered


def _gather(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return the full tensor; a shard in host memory is gathered on ``device``."""
    if isinstance(tensor, DTensor) and device is not None and tensor.device.type != torch.device(device).type:
        tensor = tensor.to(device)
    return full_tensor(tensor)


@torch.no_grad()
def get_full_optimizer_state_dict(
    model: nn.Module, opt: Optimizer, is_rank_zero: bool, device: torch.device | None = None
) -> dict[str, Any]:
    """Gather the full state of an optimizer in rank 0's host memory. All ranks call it.

    Args:
        model: model with the parameters of ``opt``.
        opt: optimizer of all or some parameters of ``model``.
        is_rank_zero: whether this rank receives the state.
        device: see :func:`gather_cpu_state_dict`.

    Returns:
        ``{"state": {parameter name: {key: value}}, "param_groups": [{"params": [parameter name, ...], ...}]}``; empty
        on all ranks but 0.

    Raises:
        ValueError: ``opt`` has a parameter that ``model`` lacks.
    """
    names = _parameter_names(model, opt)
    states: dict[str, dict[str, Any]] = {}
    for parameter, parameter_state in opt.state.items():
        gathered = {}
        for key, value in parameter_state.items():
            if isinstance(value, torch.Tensor):
                value = _gather(value, device).to("cpu", copy=True)
            gathered[key] = value
        states[names[parameter]] = gathered
    if not is_rank_zero:
        return {}
    return {"state": states, "param_groups": _named_groups(opt, names)}


def load_from_full_optimizer_state_dict(
    model: nn.Module, opt: Optimizer, full_sd: Mapping[str, Any], device: torch.device
) -> None:
    """Load the result of :func:`get_full_optimizer_state_dict`; every rank stores its shard. All ranks call it.

    Args:
        model: model with the parameters of ``opt``.
        opt: optimizer of parameters of ``model``.
        full_sd: full tensors by parameter name.
        device: accepted and ignored; the state is placed with the parameters.

    Raises:
        CheckpointError: the state belongs to other parameters.
        ValueError: ``opt`` has a parameter that ``model`` lacks.
    """
    groups = _named_groups(opt, _parameter_names(model, opt))
    names = _names_in(groups)
    saved_names = _names_in(full_sd["param_groups"])
    if sorted(names) != sorted(saved_names):
        unmatched = min(set(names) ^ set(saved_names), default="?")
        raise CheckpointError(
            f"The optimizer state in the checkpoint belongs to other parameters ('{unmatched}' is on one side only): "
            "resume with the config that the checkpoint was trained with."
        )

    # torch's own load_state_dict takes parameters by number.
    numbers = {name: number for number, name in enumerate(names)}
    state = {}
    for name, values in full_sd["state"].items():
        parameter = model.get_parameter(name)
        state[numbers[name]] = {key: _shard(value, parameter) for key, value in values.items()}
    # Parameters may be grouped in another way: a group gets the settings with which its first parameter was saved.
    saved_groups = {}
    for saved_group in full_sd["param_groups"]:
        for name in saved_group["params"]:
            saved_groups[name] = saved_group
    for group in groups:
        group_names = group["params"]
        if group_names:
            group.update(saved_groups[group_names[0]])
        group["params"] = [numbers[name] for name in group_names]
    opt.load_state_dict({"state": state, "param_groups": groups})


def _shard(value: Any, parameter: nn.Parameter) -> Any:
    """Return this rank's shard of a full tensor with the shape of a sharded parameter; other values unchanged."""
    if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return read_shard(parameter, tuple(value.shape), value.dtype, lambda slices: value[slices])
    return value


def _parameter_names(model: nn.Module, opt: Optimizer) -> dict[nn.Parameter, str]:
    """Return the names of the model's parameters. Raises ``ValueError`` if the optimizer has another parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in opt.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"{type(opt).__name__} has a parameter that the model lacks: build it over model.parameters()."
                )
    return names


def _named_groups(opt: Optimizer, names: dict[nn.Parameter, str]) -> list[dict[str, Any]]:
    """Return the optimizer's ``param_groups`` with parameter names instead of parameters."""
    groups = []
    for group in opt.param_groups:
        groups.append({**group, "params": [names[parameter] for parameter in group["params"]]})
    return groups


def _names_in(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parameter names of all groups, in order."""
    names: list[str] = []
    for group in groups:
        names += group["params"]
    return names
