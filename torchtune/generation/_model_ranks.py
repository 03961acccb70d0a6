"""Collectives of the ranks that share a model in generation."""

import torch.distributed as dist
from torch import Tensor, nn

from torchtune.generation._generation_error import GenerationError
from torchtune.modules.common_utils import attention_modules
from torchtune.training.parallel import any_rank, reshard


class ModelRanks:
    """The ranks that share the model. As a context manager, it reshards FSDP parameters on exit."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._groups: list[dist.ProcessGroup] = []
        self._tp: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        from torchtune.modules.parallel import ContextParallelAttention

        if any(isinstance(m, ContextParallelAttention) for m in (a.attention for a in attention_modules(model))):
            raise GenerationError("Generation does not support context parallelism: set context_parallel_dim to 1.")
        reshard(model)
        meshes = [parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")]
        if meshes:
            mesh = max(meshes, key=lambda mesh: mesh.ndim)
            names = mesh.mesh_dim_names or ("",) * mesh.ndim
            self._groups = [mesh.get_group(index) for index, name in enumerate(names) if name != "tp"]
            self._tp = mesh["tp"].get_group() if "tp" in names else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        reshard(self._model)  # all-gathered parameters would be stale after the next optimizer step

    def multiple(self, length: int) -> int:
        """Return ``length`` rounded up to a multiple of the sequence-parallel size."""
        return length if self._tp is None else length + -length % self._tp.size()

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank that must run the same forward passes."""
        for group in self._groups:
            flag = any_rank(flag, group)
        return flag

    def agree(self, drawn: Tensor) -> Tensor:
        """Broadcast the samples of the tensor-parallel group's first rank."""
        if self._tp is not None:
            dist.broadcast(drawn, group=self._tp, group_src=0)
        return drawn
