"""What a forward pass saves for the backward pass: activation checkpointing, and offloading to host memory.

Checkpointed modules save only their inputs, and recompute the rest. Selective checkpointing recomputes element-wise
operations, and keeps attention and some matrix products. Offloaded tensors stay in host memory between the passes.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtune.modules.moe import GroupedExperts
from torchtune.modules.transformer import TransformerSelfAttentionLayer, text_decoder
from torchtune.utils import UserError, allocates_on_host, is_simulated, onednn_linear_op, reduce_scatter_op

ACWrapPolicyType = set[type] | Callable[[nn.Module, bool, int], bool]
# A saved tensor, or the key of an offloaded one.
_Packed = Tensor | int


class ActivationCheckpointingError(UserError, ValueError):
    """Invalid mode or option of activation checkpointing."""


class CheckpointedForward:
    """Forward that saves only its inputs and recomputes activations in the backward pass.

    It replaces ``module.forward``, so the module keeps its class and parameter names.
    """

    def __init__(self, forward: Callable[..., Any], **kwargs: Any) -> None:
        self.forward = forward
        self.kwargs = {"use_reentrant": False, **kwargs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, checkpointed if gradients are enabled."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, **self.kwargs, **kwargs)


def checkpoint_module(module: nn.Module, **kwargs: Any) -> nn.Module:
    """Recompute the activations of ``module`` in its backward pass; in place, at most once.

    Args:
        module: module to checkpoint.
        kwargs: arguments of ``torch.utils.checkpoint.checkpoint``, for example ``context_fn``.
    """
    if not isinstance(module.forward, CheckpointedForward):
        module.forward = CheckpointedForward(module.forward, **kwargs)
    for submodule in module.modules():
        if isinstance(submodule, GroupedExperts):
            submodule.recomputes = True
    return module


def set_activation_checkpointing(model: nn.Module, auto_wrap_policy: ACWrapPolicyType, **kwargs: Any) -> None:
    """Recompute the activations of the selected modules in the backward pass, in place.

    Parameter names do not change. Of nested modules, only the outermost is selected.

    Args:
        model: changed in place.
        auto_wrap_policy: set of module classes, or ``policy(module, recurse, numel) -> bool`` as in FSDP.
        kwargs: arguments of ``torch.utils.checkpoint.checkpoint``.

    Raises:
        ValueError: no module is selected.

    Example:
        >>> torchtune.training.set_activation_checkpointing(model, auto_wrap_policy={type(model.layers[0])})
    """
    if isinstance(auto_wrap_policy, set | frozenset):
        classes = tuple(auto_wrap_policy)

        def is_selected(module: nn.Module) -> bool:
            return isinstance(module, classes)
    else:

        def is_selected(module: nn.Module) -> bool:
            numel = sum(parameter.numel() for parameter in module.parameters())
            return auto_wrap_policy(module, False, numel)  # recurse=False: whether to select this module

    def checkpoint_selected(module: nn.Module) -> int:
        """Checkpoint the outermost selected modules, and return their number."""
        if is_selected(module):
            checkpoint_module(module, **kwargs)
            return 1  # without its children: they would be recomputed twice
        return sum(checkpoint_selected(child) for child in module.children())

    if checkpoint_selected(model) == 0:
        raise ValueError(f"No module of {type(model).__name__} matches the activation checkpointing policy.")


class _EveryOtherMatmul:
    """Policy that saves attention and every other matrix product; one instance per checkpointed forward."""

    def __init__(self) -> None:
        aten = torch.ops.aten
        # Attention, and the reduce-scatter of tensor parallelism, which would be communicated again.
        self.attention_ops = {torch.ops.higher_order.flex_attention, reduce_scatter_op()}
        kernel_names = (
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_cudnn_attention",
            "_flash_attention_forward",
        )
        for name in kernel_names:
            if hasattr(aten, name):  # not every release of torch has all kernels
                self.attention_ops.add(getattr(aten, name).default)
        self.matmul_ops = {aten.mm.default, aten.addmm.default, aten.bmm.default}
        onednn_linear = onednn_linear_op()
        if onednn_linear is not None:  # linear layers on a CPU
            self.matmul_ops.add(onednn_linear)
        # Matrix products so far in the forward (False) and in its recomputation (True), which must save the same ones.
        self.matmuls = {False: 0, True: 0}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in self.matmul_ops:
            self.matmuls[ctx.is_recompute] += 1
            is_saved = self.matmuls[ctx.is_recompute] % 2 == 1
        else:
            is_saved = op in self.attention_ops
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _every_other_matmul() -> Any:  # a function, because the compiler supports no method here
    """Return the contexts of a forward pass and of its recomputation, which share the policy's counts."""
    return create_selective_checkpoint_contexts(_EveryOtherMatmul())


def checkpoint_wrapper(module: nn.Module, ac_mode: str, ac_style: int | str | None) -> nn.Module:
    """Checkpoint one module in place.

    Args:
        module: usually a layer.
        ac_mode: ``"full"`` recomputes everything, ``"selective"`` follows ``ac_style``.
        ac_style: ``"op"`` saves attention and every other matrix product; for an integer, the module is recomputed as a
            whole, because the caller already selects every n-th layer.

    Raises:
        ActivationCheckpointingError: the mode or option is unknown.
    """
    if ac_mode == "full" or (ac_mode == "selective" and isinstance(ac_style, int)):
        return checkpoint_module(module)
    if ac_mode == "selective" and ac_style == "op":
        return checkpoint_module(module, context_fn=_every_other_matmul)
    raise ActivationCheckpointingError(
        f"ac_mode={ac_mode!r} with ac_option={ac_style!r} is not known: use ac_mode 'full', or 'selective' with "
        "ac_option 'op' or a number n for every n-th layer."
    )


def checkpoint_activations(
    model: nn.Module, every_layer: bool, ac_mode: str | None = None, ac_option: int | str | None = None
) -> None:
    """Apply activation checkpointing according to a recipe's settings.

    Args:
        model: a decoder or a composite model; its layers are changed in place.
        every_layer: recompute every transformer layer, including encoder layers.
        ac_mode: see :func:`apply_selective_activation_checkpointing`; excludes ``every_layer``.
        ac_option: see :func:`apply_selective_activation_checkpointing`.

    Raises:
        ActivationCheckpointingError: both ways are enabled, or the mode or option is unknown.

    Example:
        >>> torchtune.training.checkpoint_activations(model, True)
        >>> model(torch.tensor([[5, 40, 7]])).sum().backward()
    """
    if every_layer and ac_mode is not None:
        raise ActivationCheckpointingError("ac_mode: set it or enable_activation_checkpointing, not both.")
    if every_layer:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    apply_selective_activation_checkpointing(model, ac_mode, ac_option)


def apply_selective_activation_checkpointing(
    model: nn.Module, ac_mode: str | None, ac_option: int | str | None
) -> None:
    """Checkpoint the layers of the text decoder in place.

    Args:
        model: a decoder.
        ac_mode: ``"full"`` recomputes every layer; ``"selective"`` follows ``ac_option``; None or ``"none"``: off.
        ac_option: ``"op"`` saves attention and every other matrix product in every layer; a number ``n`` (or its
            string) recomputes every n-th layer as a whole.

    Raises:
        ActivationCheckpointingError: the mode or option is unknown.
    """
    if ac_mode is None or ac_mode == "none":
        return
    interval = 1
    if ac_mode == "selective" and str(ac_option).isdigit():
        ac_option = int(ac_option)
        interval = ac_option
    if interval < 1:
        raise ActivationCheckpointingError(f"ac_option={ac_option!r} must be at least 1.")
    for number, layer in enumerate(text_decoder(model).layers, start=1):
        if number % interval == 0:
            checkpoint_wrapper(layer, ac_mode, ac_option)


class _SimulatedStreams:
    """Stand-in for ``torch.cuda`` and its streams in a simulation: every operation completes at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class OffloadActivations(saved_tensors_hooks):
    """Move tensors saved for the backward pass to host memory, and back when the backward pass needs them.

    Parameters, their views, tensors on the host and small tensors are not moved. With streams, copies overlap with
    computation: at most ``max_fwd_stash_size`` tensors wait on the device for their copies, and the backward pass
    prefetches the next tensor.

    Args:
        use_pin_memory: copy to pinned (page-locked) memory, which is faster and cannot be swapped out.
        use_streams: copy on a separate stream.
        max_fwd_stash_size: maximum number of tensors on the device that wait for their copies.
        min_offload_size: minimum size in bytes of an offloaded tensor.

    Raises:
        UserError: there is no accelerator with separate memory.
        ValueError: ``max_fwd_stash_size`` is below 1.

    Example:
        >>> with torchtune.training.OffloadActivations():  # doctest: +SKIP
        ...     loss = model(tokens).sum()
    """

    MAX_FWD_STASH_SIZE = 5

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        max_fwd_stash_size: int = MAX_FWD_STASH_SIZE,
        min_offload_size: int = 1024,
    ) -> None:
        if max_fwd_stash_size < 1:
            raise ValueError(f"max_fwd_stash_size must be at least 1, got {max_fwd_stash_size}.")
        if is_simulated():  # tensors without values, on the CPU: they need no streams and cannot be pinned
            self.device = torch.device("cpu")
            self.namespace = _SimulatedStreams()
            use_pin_memory = False
        else:
            self.device = None
            if torch.accelerator.is_available():
                self.device = torch.accelerator.current_accelerator()
            if self.device is None or self.device.type == "mps":  # MPS shares the host's memory
                raise UserError(
                    "enable_activation_offloading: there is no accelerator with memory of its own here: set it to "
                    "False."
                )
            self.namespace = getattr(torch, self.device.type)
        self.use_pin_memory = use_pin_memory
        self.min_offload_size = min_offload_size
        self.max_fwd_stash_size = max_fwd_stash_size
        self.copy_stream = self.namespace.Stream() if use_streams else None
        self._next_key = 0
        self._host_tensors: dict[int, Tensor] = {}
        self._device_tensors: dict[int, Tensor] = {}  # prefetched for the backward pass
        self._pending_copies: deque[tuple[Tensor, Any]] = deque()  # with the event of each copy
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        # Drop tensors of a graph that never ran its backward pass.
        self._host_tensors.clear()
        self._device_tensors.clear()
        self._pending_copies.clear()
        super().__enter__()

    def _should_keep(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor stays where it is."""
        if tensor.device.type != self.device.type:
            return True
        if tensor.numel() * tensor.element_size() < self.min_offload_size:
            return True
        # A parameter, or a view of one such as its transpose, stays on the device for the optimizer anyway.
        base = tensor
        if tensor._base is not None:
            base = tensor._base
        if isinstance(base, nn.Parameter):
            return True
        # Subclasses, such as quantized and sharded tensors, hold their data in inner tensors. The tensors of a
        # simulation are of a subclass, too, but without inner tensors.
        if is_simulated():
            return hasattr(tensor, "__tensor_flatten__")
        return type(tensor) is not Tensor

    def _pack(self, tensor: Tensor) -> _Packed:
        """Start the copy of a saved tensor to the host, and return its key; the tensor itself if it stays."""
        if self._should_keep(tensor):
            return tensor
        key = self._next_key
        self._next_key += 1
        with allocates_on_host():  # a simulation counts memory on the CPU as the device's otherwise
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.use_pin_memory)
        if self.copy_stream is None:
            host.copy_(tensor)
        else:
            compute = self.namespace.current_stream()
            # The tensor must live until its copy is complete. The compute stream waits for the oldest copies, so that
            # its next kernels reuse their memory only afterwards.
            while len(self._pending_copies) >= self.max_fwd_stash_size:
                _, copied = self._pending_copies.popleft()
                compute.wait_event(copied)
            self.copy_stream.wait_stream(compute)  # the tensor is computed before it is copied
            with self.namespace.stream(self.copy_stream):
                host.copy_(tensor, non_blocking=True)
                self._pending_copies.append((tensor, self.copy_stream.record_event()))
        self._host_tensors[key] = host
        return key

    def _prefetch(self, key: int) -> None:
        """Start the copy of an offloaded tensor back to the device, at most once."""
        if key in self._host_tensors and key not in self._device_tensors:
            host = self._host_tensors[key]
            with self.namespace.stream(self.copy_stream):
                self._device_tensors[key] = host.to(self.device, non_blocking=True, copy=True)

    def _unpack(self, packed: _Packed) -> Tensor:
        """Return a saved tensor on the device, and prefetch the one that was saved before it."""
        if isinstance(packed, Tensor):
            return packed
        # The host's copy stays until the next forward pass, so that a graph can be read twice. In a simulation, `to`
        # would return it without copy=True.
        if self.copy_stream is None:
            return self._host_tensors[packed].to(self.device, copy=True)
        compute = self.namespace.current_stream()
        # The backward pass has begun: the tensors that wait for their copies are released.
        while self._pending_copies:
            _, copied = self._pending_copies.popleft()
            compute.wait_event(copied)
        self._prefetch(packed)
        compute.wait_stream(self.copy_stream)
        tensor = self._device_tensors.pop(packed)
        # The copy stream allocated it: its memory must not be reused before the compute stream has read it.
        if tensor.device.type != "cpu":  # not simulated
            tensor.record_stream(compute)
        self._prefetch(packed - 1)  # the backward pass goes through the keys in reverse
        return tensor


class NoOpManager(saved_tensors_hooks):
    """Keep saved tensors on the device inside the block, even within :class:`OffloadActivations`.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with torchtune.training.NoOpManager():
        ...     loss = weight.square().sum()
        ...
        >>> loss.backward()
    """

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


def _keep_on_device(module: nn.Module) -> None:
    """Disable offloading in ``module``: the backward pass needs its saved tensors first."""
    blocks: list[NoOpManager] = []  # a stack: the module may call itself

    def enter(*_: Any) -> None:
        blocks.append(NoOpManager())
        blocks[-1].__enter__()

    def leave(*_: Any) -> None:
        blocks.pop().__exit__()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def get_act_offloading_ctx_manager(
    model: nn.Module, enable_activation_offloading: bool, use_streams: bool = True
) -> "OffloadActivations | contextlib.nullcontext":
    """Return the context manager for a recipe's forward pass.

    Activations of the output projection stay on the device. The context manager can be entered repeatedly.

    Args:
        model: model to train. With offloading, its ``output`` module gets hooks; a ``ModuleDict`` holds several models.
        enable_activation_offloading: if False, return a context manager that does nothing.
        use_streams: copy on a separate stream.

    Raises:
        UserError: there is no accelerator to offload from.

    Example:
        >>> with torchtune.training.get_act_offloading_ctx_manager(model, False):
        ...     loss = model(torch.tensor([[5, 40, 7]])).sum()
    """
    if not enable_activation_offloading:
        return contextlib.nullcontext()
    manager = OffloadActivations(use_streams=use_streams)
    models = model.values() if isinstance(model, nn.ModuleDict) else [model]
    for trained_model in models:
        output = getattr(text_decoder(trained_model), "output", None)
        if isinstance(output, nn.Module):
            _keep_on_device(output)
    return manager
