"""Observe every operator of a run: memory, FLOPs, bytes and collectives; supply values that fake tensors lack."""

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import flop_registry

from torchtune.estimate._ledger import Ledger, storages, weighted_sum
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.transformer import text_decoder
from torchtune.supervision import attention_pairs
from torchtune.utils import (
    FakeTensor,
    TorchDispatchMode,
    fsdp_groups,
    group_named,
    is_on_host,
    shape_propagation,
    tree_leaves,
    unset_fake_temporarily,
)

_aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
# In-place operators that change only values, which fake tensors lack: they are not run.
_IN_PLACE = {_aten.add_, _aten.bitwise_and_, _aten.copy_, _aten.masked_fill_, _aten.random_, _aten.zero_}
_COPIES = (_aten.copy_.default, _aten._to_copy.default)
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor}
_LIBRARY = "torchtune"
_TORCH = torch.__path__[0]
# Elements of real tensors that an operator may compute with in a simulation.
_MAX_REAL = 2**26
_HERE = __file__.rpartition("/")[0]
# (kind, ranks of the process group).
Collective = tuple[str, tuple[int, ...]]
_COLLECTIVES = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}


class Work:
    """Work of a phase of a step.

    Attributes:
        flops: FLOPs by dtype.
        calls: number of operators by (FLOPs, bytes read and written, dtype).
        collectives: number of FSDP's collectives, which overlap with computation.
        sent: bytes of FSDP's collectives.
        waiting: number of other collectives.
        awaited: bytes of other collectives.
        hosted: bytes copied to and from host memory, overlapping with computation.
    """

    def __init__(self) -> None:
        self.flops: Counter[torch.dtype] = Counter()
        self.calls: Counter[tuple[int, int, torch.dtype]] = Counter()
        self.collectives: Counter[Collective] = Counter()
        self.sent: Counter[Collective] = Counter()
        self.waiting: Counter[Collective] = Counter()
        self.awaited: Counter[Collective] = Counter()
        self.hosted: Counter[str] = Counter()

    @classmethod
    def combine(cls, works: Iterable[tuple[float, "Work"]]) -> "Work":
        """Return the weighted sum of works."""
        works = list(works)
        total = cls()
        for name in vars(total):  # all attributes are counters
            setattr(total, name, weighted_sum((factor, getattr(work, name)) for factor, work in works))
        return total


def stacks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of a model that have ``layers``: its text decoder and its vision tower, by name."""
    modules = {"text": text_decoder(model)}
    if isinstance(model, ImageTextModel):
        modules["vision"] = model.encoder
    return {name: module for name, module in modules.items() if hasattr(module, "layers")}


def magnitude(layer: torch.nn.Module) -> int:
    """Return the rounded log2 of a layer's parameter count, which compares sizes of neighboring layers."""
    return round(math.log2(1 + sum(parameter.numel() for parameter in layer.parameters())))


class Observer(TorchDispatchMode):
    """Dispatch mode that counts the work of a run; enter it inside a fake tensor mode, or with real tensors.

    Values read from fake data are placeholders: a float is 0, an integer 1, a bool False, all() is True, every element
    is nonzero, and a boolean index selects every row. Integers computed from real integers are real.

    Attributes:
        ledger: record of memory.
        work: work by (step, phase), from step 0.
        step: number of optimizer steps so far.
        path: names of the modules in the current call stack.
        in_fsdp: nonzero while FSDP communicates; allocations are then its buffers.
        offload: whether parameters, gradients and optimizer states are in host memory.
        accumulates: whether one simulated backward pass stands for several micro-batches.
        entered: whether the mode has been entered.
        fake: whether tensors are fake; then values that they lack are supplied.
    """

    def __init__(self, *, fake: bool = True) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.fake = fake
        self.work: dict[tuple[int, str], Work] = defaultdict(Work)
        self.step = 0
        self.path: list[str] = []
        self.in_fsdp = 0
        self.offload = False
        self.accumulates = False
        self.entered = False
        self._quiet = 0  # nonzero while operators are not counted
        self._has_stepped = False  # the next forward pass begins a step
        self._names: dict[int, str] = {}  # by the id of a module
        self._layers: dict[int, str] = {}  # moments by the id of a layer
        self._parameters: set[int] = set()  # ids
        self._patches = ExitStack()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that code that looks for active dispatch modes behaves as in a run without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF:  # half of all calls
            return func(*args)
        if any(kind not in _PLAIN and kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types):
            return NotImplemented  # a wrapper tensor: its inner operators are dispatched later
        inputs = list(_tensors((args, kwargs)))
        if self.fake:
            out = self._answer(func, args, kwargs, inputs)
        else:
            out = func(*args, **kwargs)
        if not self._quiet:
            self._count(func, args, kwargs, inputs, out)
        return out

    def _answer(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Run an operator, with placeholders for values that a fake tensor lacks.

        The placeholders let a step go on as with ordinary data: no flag is raised, nothing is empty, and a selection
        keeps all rows, which takes the most memory.
        """
        packet = func._overloadpacket
        first = None
        if args:
            first = args[0]
        is_real = not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)
        # Small real tensors, such as counts and lengths, keep their values: outside of the fake mode.
        is_small = sum(tensor.numel() for tensor in tensors) < _MAX_REAL
        # Positions of arange are real as well; other operators without inputs, such as zeros, make fake tensors.
        if is_real and (packet is _aten.arange or (tensors and is_small)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if packet in _IN_PLACE and isinstance(first, FakeTensor):
            return first  # its shape does not change, and values are not there
        if func is _aten._local_scalar_dense.default:  # item()
            if first.dtype == torch.bool:
                return False
            if first.is_floating_point():
                return 0.0
            return 1
        if func is _aten.nonzero.default:
            return torch.empty(first.numel(), first.dim(), dtype=torch.int64, device=first.device)
        if func is _aten.equal.default:
            return False  # two tensors of data differ
        if func is _aten.all.default:
            with unset_fake_temporarily():
                return torch.tensor(True)  # real, so that its value can be read
        if func is _aten.index.Tensor:
            index = args[1][0]
            # A mask selects every row: the shape of the output must not depend on values.
            if index is not None and index.dtype == torch.bool:
                return first.new_empty(index.numel(), *first.shape[index.dim() :])
        return func(*args, **kwargs)

    def _count(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], out: Any) -> None:
        """Record the memory and the work of an operator."""
        outputs = list(_tensors(out))
        for tensor in outputs:
            self.record_memory(tensor, func)
        work = self.work[self.step, self.ledger.phase]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(work, func, args, kwargs, inputs)
            return
        if not outputs or _is_view(func):  # launches no kernel
            return
        if func in _COPIES:
            sides = {self.ledger.is_on_host(tensor) for tensor in (*inputs, *outputs)}
            if len(sides) == 2:  # a copy between device and host
                work.hosted["bytes"] += _num_bytes(outputs[0])
                return
        dtype = outputs[0].dtype
        if func._overloadpacket is _aten._scaled_mm:
            # A product of float8 matrices has an output of another dtype, and takes the time of its inputs' dtype.
            dtype = inputs[0].dtype
        flops = _flops(func, args, kwargs, out)
        moved = sum(_num_bytes(tensor) for tensor in (*inputs, *outputs))
        work.calls[flops, moved, dtype] += 1
        if flops:
            work.flops[dtype] += flops

    def _count_collective(self, work: Work, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> None:
        """Record the bytes and the process group of a collective."""
        # "c10d::_allgather_base_" and "_c10d_functional::all_gather_into_tensor" are both an all-gather.
        name = func._schema.name.split("::")[1].replace("_", "")
        kind = next((text for key, text in _COLLECTIVES.items() if key in name), None)
        if kind is None or not inputs:  # barriers and waits, which send nothing
            return
        size = max(_num_bytes(tensor) for tensor in inputs)
        ranks = _ranks_of(func, (*args, *kwargs.values()))
        if func.namespace == "_c10d_functional" and kind == "all-gather":
            size *= len(ranks)  # its input is a shard; c10d's operators have the whole output among their inputs
        if self.in_fsdp and self.offload:  # shards and their gradients are in host memory
            work.hosted["bytes"] += size // len(ranks)
        if self.in_fsdp:
            work.collectives[kind, ranks] += 1
            work.sent[kind, ranks] += size
        else:
            work.waiting[kind, ranks] += 1
            work.awaited[kind, ranks] += size

    def record_memory(self, tensor: torch.Tensor, func: Any = None) -> None:
        """Record the memory of a tensor."""
        for storage in storages(tensor):
            if storage._cdata in self.ledger._live:
                continue
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            operator = f"[{shape}] {str(tensor.dtype).removeprefix('torch.')}"
            if func is not None:
                operator = f"{func._schema.name.replace('::', '.')} {operator}"
            is_offloaded = self.offload and self.ledger.phase in ("set-up", "optimizer")
            on_host = is_on_host() or is_offloaded
            component = "activations"  # parameters, gradients and states are marked later
            if self.in_fsdp or self.ledger.phase in ("set-up", "optimizer"):
                component = "other"
            self.ledger.add(storage, component, operator, self._where(), on_host=on_host)

    def multiply(self, factor: float) -> None:
        """Multiply the work of forward and backward passes, to include micro-batches that were not run."""
        for (step, phase), work in self.work.items():
            if phase in ("forward", "backward"):
                self.work[step, phase] = Work.combine([(factor, work)])

    def _where(self) -> str:
        """Return the module being called, and the line of the library or of the recipe."""
        line = "torch"  # if all frames are those of torch and of this observer
        frame = sys._getframe(2)  # not this method and its caller, record_memory
        while frame is not None:
            file = frame.f_code.co_filename
            is_observer = file.startswith(_HERE)
            is_torch = file.startswith(f"{_TORCH}/")
            # Generated code has names such as "<string>".
            if not is_observer and not is_torch and not file.startswith("<"):
                # The library's files with their folder, a recipe by its name.
                _, library, path = file.rpartition(f"/{_LIBRARY}/")
                name = f"{_LIBRARY}/{path}" if library else file.rpartition("/")[2]
                line = f"{name}:{frame.f_lineno}"
                break
            frame = frame.f_back
        if not self.path:
            return line
        return f"{self.path[-1]}, {line}"

    # Patches of torch, active inside the context.

    def patch(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace an attribute by ``make(attribute)`` until the block ends, if this version of torch has it."""
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, make(original))
            self._patches.callback(setattr, owner, name, original)

    def __enter__(self) -> "Observer":
        # FSDP frees and allocates its buffers by resizing, which no operator shows.
        def recording(resize_: Callable[..., Any]) -> Callable[..., Any]:
            def resize(storage: torch.UntypedStorage, size: int) -> Any:
                resize_(storage, size)
                self.ledger.resized(storage, "other")
                return storage

            return resize

        self.patch(torch.UntypedStorage, "resize_", recording)
        # The methods of shape propagation, in several versions of torch; see `_quietly`.
        for name in ("propagate_tensor_meta", "_propagate_tensor_meta", "_propagate_tensor_meta_non_cached"):
            self.patch(shape_propagation(), name, self._quietly)
        if self.fake:
            # Routing counts are fake, so that experts are taken as balanced.
            from torchtune.modules.moe import frozen_experts
            from torchtune.modules.parallel import expert_parallel

            self.patch(expert_parallel, "exchange_sizes", lambda _: _balanced_sizes)
            self.patch(frozen_experts, "row_ends", lambda _: _balanced_ends)
        self.entered = True
        self._watch_phases()
        self._watch_fsdp()
        enter_hook = torch.nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        # Always called, so that the path is right again after an error that the recipe handles.
        leave_hook = torch.nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True)
        self._patches.callback(enter_hook.remove)
        self._patches.callback(leave_hook.remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _quietly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Ignore DTensor's shape propagation, which runs operators on full fake tensors."""

        def quiet(*args: Any, **kwargs: Any) -> Any:
            self._quiet += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._quiet -= 1

        return quiet

    def _watch_phases(self) -> None:
        """Begin the phases backward and optimizer when they do, and count steps."""

        def in_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.ledger.enter("backward")
                try:
                    return backward(*args, **kwargs)
                finally:
                    self.ledger.enter("optimizer")
                    if self.accumulates:
                        self.ledger.accumulate()

            return run

        self.patch(torch.autograd, "backward", in_backward)
        hook = register_optimizer_step_post_hook(self._stepped)
        self._patches.callback(hook.remove)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Mark the states of an optimizer after its step."""
        self._has_stepped = True
        for parameter, state in optimizer.state.items():
            if id(parameter) in self._parameters:  # not the temporary copies of a higher-precision step
                for value in state.values():
                    self.ledger.mark(value, "optimizer", on_host=self.offload)
        self.ledger.end_step()

    def _watch_fsdp(self) -> None:
        """Count what FSDP allocates and sends as its own, and mark the gradients that it makes."""

        def inside(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(group: Any, *args: Any, **kwargs: Any) -> Any:
                if method.__name__ == "post_backward":
                    # Before the reduce-scatter, the gradients are unsharded; the method frees them.
                    for parameter in group.fsdp_params:
                        self.ledger.mark(getattr(parameter, "unsharded_accumulated_grad", None), "gradients")
                        unsharded = getattr(parameter, "_unsharded_param", None)
                        self.ledger.mark(getattr(unsharded, "grad", None), "gradients")
                self.in_fsdp += 1
                self.path.append(f"FSDP of {_any_layer(getattr(group, '_module_fqn', None) or 'model')}")
                try:
                    return method(group, *args, **kwargs)
                finally:
                    self.in_fsdp -= 1
                    self.path.pop()
                    if method.__name__ in ("post_backward", "finalize_backward"):  # sharded gradients are there now
                        for parameter in group.fsdp_params:
                            self.ledger.mark(parameter.sharded_param.grad, "gradients", on_host=self.offload)

            run.__name__ = method.__name__  # compared above if another observer wraps this function
            return run

        for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward"):
            self.patch(fsdp_groups(), name, inside)

    def _enter_module(self, module: torch.nn.Module, _: Any) -> None:
        """Add a module to the path; the forward pass of a layer is a moment of its own."""
        name = self._names.get(id(module))
        if name is None:  # not of a model that was loaded
            return
        self.path.append(name)
        # With activation checkpointing, forward passes also run inside the backward pass.
        if self.ledger.phase == "backward":
            return
        if self._has_stepped:
            self.step += 1
            self._has_stepped = False
        if self.ledger.phase != "forward":
            self.ledger.enter("forward")
        if id(module) in self._layers:
            self.ledger.enter("forward", self._layers[id(module)])

    def _leave_module(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        """Remove a module from the path, and let the moments of a layer begin that follow its forward pass."""
        if id(module) in self._names and self.path:
            self.path.pop()
        layer = self._layers.get(id(module))
        if layer is not None and self.ledger.phase != "backward":
            self.ledger.enter("forward", f"after {layer}")
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    # The gradient of a layer's output is complete when the backward pass of the layer begins.
                    tensor.register_hook(lambda _: self.ledger.enter("backward", layer))
                    break

    def record_model(self, model: torch.nn.Module, name: str) -> None:
        """Record a model after its weights are loaded.

        A simulation builds few of the layers; ``kept_layers`` of a stack has their numbers in the whole model.
        """
        for path, module in model.named_modules():
            self._names[id(module)] = _any_layer(path or name)
        for kind, stack in stacks(model).items():
            kept_layers = getattr(stack, "kept_layers", range(len(stack.layers)))
            # A moment is the forward or backward pass of a layer. Its peak depends on the sizes of the layers beside it
            # as well, so that they are in its name: peaks are extrapolated between moments of the same name.
            sizes = [None, *(magnitude(layer) for layer in stack.layers), None]  # none before the first, after the last
            for position, (layer, index) in enumerate(zip(stack.layers, kept_layers, strict=True)):
                sizes_beside = (sizes[position], sizes[position + 2])
                self._layers[id(layer)] = f"{name} {kind} {index} {sizes_beside}"
        for parameter in model.parameters():
            self.record_memory(parameter)
            self._parameters.add(id(parameter))
            self.ledger.mark(parameter, "parameters", on_host=self.offload)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter: self.ledger.mark(parameter.grad, "gradients")
                )


def _any_layer(path: str) -> str:
    """Return a module's path with * instead of the layer's index, so that memory of equal layers is added up."""
    return re.sub(r"(layers)\.\d+", r"\1.*", path)


def _balanced_sizes(counts: torch.Tensor, _: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Return the rows that an expert all-to-all sends to and receives from every rank under perfect balance."""
    sizes = [(rows + rank) // len(counts) for rank in range(len(counts))]
    return sizes, sizes


def _balanced_ends(ends: torch.Tensor, experts_per_group: int, rows: int) -> list[int]:
    """Return where the rows of each group of experts end under perfect balance."""
    num_experts = len(ends)
    last_experts = [*range(experts_per_group, num_experts, experts_per_group), num_experts]
    return [rows * expert // num_experts for expert in last_experts]


def _num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that an operator reads or writes of a tensor."""
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, at any depth of lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _is_view(func: Any) -> bool:
    """Return whether an operator's output shares the memory of its input without changing it."""
    returns = func._schema.returns
    if not returns:
        return False
    alias = returns[0].alias_info
    return alias is not None and not alias.is_write


def _ranks_of(func: Any, args: Any) -> tuple[int, ...]:
    """Return the ranks of a collective's process group: an object for c10d, a name for functional collectives."""
    for value in tree_leaves(args):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
        # Names of groups have digits; other texts are the names of reductions.
        if isinstance(value, str) and func.namespace == "_c10d_functional" and not value.isalpha():
            return tuple(dist.get_process_group_ranks(group_named(value)))
    return tuple(range(dist.get_world_size()))


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of an operator; 0 for operators without matrix products."""
    packet = func._overloadpacket
    if packet is _aten.convolution_backward:
        grad, x, weight, *_, groups, output_mask = args
        if groups == x.shape[1]:
            return _depthwise_backward_flops(grad, weight, output_mask)
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out)
    formula = _CUSTOM_FLOPS.get(str(packet))
    if formula is None:
        return 0
    return formula(*args, **kwargs)


def _depthwise_backward_flops(grad: torch.Tensor, weight: torch.Tensor, needs_gradient: Sequence[bool]) -> int:
    """Return the FLOPs of the gradients of a convolution's input and weight, in which channels are not mixed.

    torch's formula of the weight's gradient has all pairs of channels.

    Args:
        grad: gradient of the output, ``[b, c, s]``.
        weight: ``[c, 1, K]``.
        needs_gradient: whether input, weight and bias need one.
    """
    return 2 * grad.numel() * weight.shape[-1] * sum(needs_gradient[:2])


def _attention_flops(products: int, q: torch.Tensor, cu_seqlens: torch.Tensor, window: int) -> int:
    """Return the FLOPs of an attention with a number of products of queries and keys; ``q`` is ``[tokens, h, d]``."""
    tokens, heads, head_dim = q.shape[:3]
    lengths = [tokens]  # one document, if the lengths of documents are unknown
    if not isinstance(cu_seqlens, FakeTensor):
        with unset_fake_temporarily():
            lengths = cu_seqlens.diff().tolist()
    pairs = 0
    for length in lengths:
        pairs += attention_pairs(length, window or None)
    return 2 * products * pairs * heads * head_dim


def _delta_rule_flops(of_state: int, of_value: int, of_key: int, of_shared: int, k: Any, v: Any) -> int:
    """Return the FLOPs of products with the state, and with the 64 positions of a chunk.

    The inverse of a chunk's triangular system, a few percent, is left out.

    Args:
        of_state: FLOPs per token, head and element of the state ``[key_dim, value_dim]``.
        of_value: FLOPs per token, position of the chunk, head and element of a value.
        of_key: FLOPs per token, position of the chunk, head and element of a key.
        of_shared: the same for products that heads with the same key share.
        k: keys ``[b, s, shared heads, key_dim]``.
        v: values ``[b, s, heads, value_dim]``.
    """
    batch, length, heads, value_dim = v.shape
    shared_heads, key_dim = k.shape[2:]
    state = of_state * heads * key_dim * value_dim
    chunk = heads * (of_value * value_dim + of_key * key_dim) + of_shared * shared_heads * key_dim
    return batch * length * (state + 64 * chunk)


# The library's custom operators by name. Attention: scores and values forward; scores and four gradients backward.
_CUSTOM_FLOPS: dict[str, Callable[..., int]] = {
    "torchtune.document_attention": lambda q, k, v, cu, sinks=None, window=0, *_: _attention_flops(2, q, cu, window),
    "torchtune.document_attention_backward": (
        lambda grad, q, k, v, out, lse, cu, sinks=None, window=0, *_: _attention_flops(5, q, cu, window)
    ),
    "torchtune.gated_delta_rule": lambda q, k, v, *_: _delta_rule_flops(6, 4, 2, 4, k, v),
    "torchtune.gated_delta_rule_backward": lambda grad, q, k, v, *_: _delta_rule_flops(14, 10, 8, 4, k, v),
    "torchtune.state_space": lambda q, k, v, *_: _delta_rule_flops(4, 2, 0, 2, k, v),
    "torchtune.state_space_backward": lambda grad, q, k, v, *_: _delta_rule_flops(10, 6, 0, 6, k, v),
    "torchtune.grouped_rows": lambda x, weight, counts: 2 * x.shape[0] * weight.shape[1] * weight.shape[2],
    "torchtune.grouped_weights": lambda x, grad, counts: 2 * x.shape[0] * x.shape[1] * grad.shape[1],
}
