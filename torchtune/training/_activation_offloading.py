"""Keeping activations in host memory between the forward and the backward pass."""

import contextlib
from collections import deque
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from torchtune.modules.transformer import text_decoder
from torchtune.utils import UserError, allocates_on_host, is_simulated

_Packed = torch.Tensor | int


class _SimulatedStreams:
    """What the namespace of a device has, for a simulated one: everything is done at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self

    def __enter__(self) -> None:
        """Of a stream: nothing."""

    def __exit__(self, *_: object) -> None:
        """Of a stream: nothing."""


class OffloadActivations(saved_tensors_hooks):
    """Inside the block, what autograd keeps for the backward pass moves to host memory, and back when needed.

    Parameters, views of them, tensors already on the host and small ones stay where they are. With streams the
    copies run beside the computation: a tensor is held on the device until its copy is done (at most
    ``max_fwd_stash_size`` of them), and in the backward pass the tensor before the one asked for is fetched ahead.

    Args:
        use_pin_memory: copy into page-locked memory, which is faster and cannot be swapped out.
        use_streams: copy on a stream of its own.
        max_fwd_stash_size: tensors that may wait on the device for the end of their copy.
        min_offload_size: bytes below which a tensor stays.

    Raises:
        UserError: there is no accelerator that copies to and from.
        ValueError: ``max_fwd_stash_size`` is below 1.

    Example:
        >>> with torchtune.training.OffloadActivations():  # doctest: +SKIP
        ...     loss = model(tokens).sum()
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        max_fwd_stash_size: int = 5,
        min_offload_size: int = 1024,
    ) -> None:
        if max_fwd_stash_size < 1:
            raise ValueError(f"max_fwd_stash_size must be at least 1, got {max_fwd_stash_size}.")
        self.device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if is_simulated():
            self.device, use_pin_memory = torch.device("cpu"), False
        if self.device is None or self.device.type == "mps":
            raise UserError(
                "enable_activation_offloading: there is no accelerator with memory of its own here: set it to False."
            )
        self.namespace = _SimulatedStreams() if is_simulated() else getattr(torch, self.device.type)
        self.use_pin_memory = use_pin_memory
        self.min_offload_size = min_offload_size
        self.max_fwd_stash_size = max_fwd_stash_size
        self.copy_stream = self.namespace.Stream() if use_streams else None
        self._next_key = 0
        self._hosted: dict[int, torch.Tensor] = {}
        self._fetched: dict[int, torch.Tensor] = {}
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        # A graph that was thrown away without a backward pass leaves nothing behind.
        self._hosted.clear()
        self._fetched.clear()
        self._leaving.clear()
        super().__enter__()

    def _stays(self, tensor: torch.Tensor) -> bool:
        base = tensor._base if tensor._base is not None else tensor
        return (
            tensor.device.type != self.device.type
            or tensor.numel() * tensor.element_size() < self.min_offload_size
            or isinstance(base, torch.nn.Parameter)
            or (hasattr(tensor, "__tensor_flatten__") if is_simulated() else type(tensor) is not torch.Tensor)
        )

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        if self._stays(tensor):
            return tensor
        key = self._next_key
        self._next_key += 1
        with allocates_on_host():
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.use_pin_memory)
        if self.copy_stream is None:
            host.copy_(tensor)
        else:
            compute = self.namespace.current_stream()
            while len(self._leaving) >= self.max_fwd_stash_size:
                compute.wait_event(self._leaving.popleft()[1])
            self.copy_stream.wait_stream(compute)
            with self.namespace.stream(self.copy_stream):
                host.copy_(tensor, non_blocking=True)
                self._leaving.append((tensor, self.copy_stream.record_event()))
        self._hosted[key] = host
        return key

    def _fetch(self, key: int) -> None:
        if key in self._hosted and key not in self._fetched:
            with self.namespace.stream(self.copy_stream):
                self._fetched[key] = self._hosted[key].to(self.device, non_blocking=True, copy=True)

    def _unpack(self, packed: _Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if self.copy_stream is None:
            return self._hosted[packed].to(self.device, copy=True)
        self._drain()
        self._fetch(packed)
        compute = self.namespace.current_stream()
        compute.wait_stream(self.copy_stream)
        tensor = self._fetched.pop(packed)
        if tensor.device.type != "cpu":  # not a simulated one
            tensor.record_stream(compute)
        self._fetch(packed - 1)
        return tensor

    def _drain(self) -> None:
        """The backward pass has begun: what waited for its copy may go."""
        while self._leaving:
            self.namespace.current_stream().wait_event(self._leaving.popleft()[1])


class NoOpManager(saved_tensors_hooks):
    """Inside the block, saved tensors stay where they are, whatever an outer block says.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with torchtune.training.NoOpManager():
        ...     loss = weight.square().sum()
        ...
        >>> loss.backward()
    """

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


def _keep_on_device(module: torch.nn.Module) -> None:
    """Leave what ``module`` saves on the device: it is needed first in the backward pass."""
    blocks: list[NoOpManager] = []

    def enter(*_: Any) -> None:
        blocks.append(NoOpManager())
        blocks[-1].__enter__()

    def leave(*_: Any) -> None:
        blocks.pop().__exit__()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def get_act_offloading_ctx_manager(
    model: torch.nn.Module, enable_activation_offloading: bool, use_streams: bool = True
) -> "OffloadActivations | contextlib.nullcontext":
    """The block that a recipe runs its forward pass in.

    The output projection's activations stay on the device. The block may be entered many times.

    Args:
        model: gets hooks on its ``output`` module if activations are offloaded; a ``ModuleDict`` holds several.
        enable_activation_offloading: False gives a block that does nothing.
        use_streams: copy on a stream of its own.

    Raises:
        UserError: there is no accelerator to offload from.

    Example:
        >>> with torchtune.training.get_act_offloading_ctx_manager(model, False):
        ...     loss = model(torch.tensor([[5, 40, 7]])).sum()
    """
    if not enable_activation_offloading:
        return contextlib.nullcontext()
    manager = OffloadActivations(use_streams=use_streams)
    for part in model.values() if isinstance(model, torch.nn.ModuleDict) else [model]:
        output = getattr(text_decoder(part), "output", None)
        if isinstance(output, torch.nn.Module):
            _keep_on_device(output)
    return manager
