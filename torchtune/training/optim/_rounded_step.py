"""Steps of Adam, AdamW and SGD on bfloat16 weights, in one pass over the memory where a compiler is found.

A step is written as plain tensor code of elementary operations, each of which rounds as IEEE 754 says. Compiled and
uncompiled results are therefore equal bit for bit on a CPU, and a run may begin uncompiled and compile later. Functions
like ``torch.addcmul`` and ``torch.lerp`` are avoided, because their kernels may or may not fuse a product with a sum.
"""

import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtune.training.optim._stochastic_rounding import element_ids, random_bits, round_to_bfloat16, rounding_noise
from torchtune.utils import (
    compiler_errors,
    compiler_options,
    computes_on_cpu,
    first_line,
    get_logger,
    has_cpp_compiler,
    is_simulated,
    one_compiler_thread,
)

# A simulation runs the code on parameters of at most this many elements, and takes the step of larger ones as compiled.
_SIMULATED_UNCOMPILED = 2**18

# Pieces in a launch: a launch costs 5 µs, as long as an H100 takes for a piece of a million elements. The time of the
# compiler grows with the number, and a kernel has at most 4 KiB of arguments.
BUNDLE = 24

# Settings with which an update differs from those below, or with which the user chooses how torch runs it.
_SETTINGS_WITHOUT_RULE = ("amsgrad", "maximize", "foreach", "capturable", "differentiable")

# (value, gradient, states, scalars) -> new value and states, all float32 of the same shape.
UpdateFunction = Callable[
    [Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]],
    tuple[Tensor, list[Tensor]],
]


def adam(
    value: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Update of ``torch.optim.Adam``: weight decay is part of the gradient (Kingma and Ba, arXiv:1412.6980)."""
    decay, *other_scalars = scalars
    grad = grad + value * decay
    return _adam(value, grad, states, other_scalars)


def adamw(
    value: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Update of ``torch.optim.AdamW``: weight decay shrinks the weight (Loshchilov and Hutter, arXiv:1711.05101)."""
    decay, *other_scalars = scalars
    value = value - value * decay
    return _adam(value, grad, states, other_scalars)


def _adam(
    value: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The part that Adam and AdamW share: everything but weight decay."""
    exp_avg, exp_avg_sq = states
    one_minus_beta1, beta2, one_minus_beta2, correction2_sqrt, eps, step_size = scalars
    exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * one_minus_beta2
    denominator = exp_avg_sq.sqrt() / correction2_sqrt + eps
    value = value - exp_avg / denominator * step_size
    return value, [exp_avg, exp_avg_sq]


def sgd(
    value: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Update of ``torch.optim.SGD``, with momentum if there is a state."""
    lr, decay, momentum, one_minus_dampening = scalars
    grad = grad + value * decay
    if not states:
        return value - grad * lr, []
    buffer = states[0] * momentum + grad * one_minus_dampening
    value = value - buffer * lr
    return value, [buffer]


def sgd_nesterov(
    value: Tensor, grad: Tensor, states: Sequence[Tensor], scalars: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Update of ``torch.optim.SGD(nesterov=True)``."""
    lr, decay, momentum, one_minus_dampening = scalars
    grad = grad + value * decay
    buffer = states[0] * momentum + grad * one_minus_dampening
    next_buffer = grad + buffer * momentum  # if the gradient of the next step were the same
    value = value - next_buffer * lr
    return value, [buffer]


@dataclass(frozen=True)
class UpdateRule:
    """The update of a parameter group.

    Attributes:
        function: the update.
        states: names of its states that have an element per weight.
        counts_steps: whether the parameter's state has ``step``, the number of steps.
        scalars: (settings of the group, number of this step of the parameter) -> scalars of the function. The first
            step has the number 1; without ``counts_steps``, all others have the number 2.
    """

    function: UpdateFunction
    states: tuple[str, ...]
    counts_steps: bool
    scalars: Callable[[Mapping[str, Any], int], list[float]]


def _adam_scalars(group: Mapping[str, Any], step: int) -> list[float]:
    """Return the scalars of Adam and AdamW, computed in float64 as torch does."""
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    decay = group["weight_decay"]
    if _is_decoupled(group):
        decay = lr * decay
    # The averages start at zero: divided by these, they are unbiased.
    correction1 = 1 - beta1**step
    correction2 = 1 - beta2**step
    step_size = lr / correction1
    return [decay, 1 - beta1, beta2, 1 - beta2, correction2**0.5, group["eps"], step_size]


def _is_decoupled(group: Mapping[str, Any]) -> bool:
    """Return whether weight decay shrinks the weight, as AdamW's does; ``torch.optim.Adam`` has a setting for it."""
    return group["decoupled_weight_decay"]


def _sgd_scalars(group: Mapping[str, Any], step: int) -> list[float]:
    """Return the scalars of SGD, with or without momentum."""
    one_minus_dampening = 1 - group["dampening"]
    if step == 1:  # torch's momentum buffer starts as the first gradient, without dampening
        one_minus_dampening = 1.0
    return [float(group["lr"]), group["weight_decay"], group["momentum"], one_minus_dampening]


def find_update_rule(optimizer: type, group: Mapping[str, Any]) -> UpdateRule | None:
    """Return the update of a parameter group, or None if only the optimizer itself can take its steps.

    Args:
        optimizer: class of the optimizer.
        group: settings of the group.
    """
    if any(group.get(setting) for setting in _SETTINGS_WITHOUT_RULE):
        return None
    if group.get("fused") is False:  # the user wants torch's own loop
        return None
    if optimizer in (torch.optim.Adam, torch.optim.AdamW) and "decoupled_weight_decay" in group:
        return UpdateRule(
            function=adamw if _is_decoupled(group) else adam,
            states=("exp_avg", "exp_avg_sq"),
            counts_steps=True,
            scalars=_adam_scalars,
        )
    if optimizer is torch.optim.SGD:
        return UpdateRule(
            function=sgd_nesterov if group["nesterov"] else sgd,
            states=("momentum_buffer",) if group["momentum"] else (),
            counts_steps=False,
            scalars=_sgd_scalars,
        )
    return None


def step_elements(
    update: UpdateFunction,
    weight: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    scalars: Tensor,
    ids: Tensor | None,
    origin: Tensor,
    key: Tensor,
    is_skipped: Tensor | None,
) -> None:
    """Step the elements of a piece: read the storage as float32, update, round, write.

    Args:
        update: the update.
        weight: ``[n]``; changed in place.
        grad: ``[n]``.
        states: ``[n]`` each, in the order of the update's; changed in place.
        scalars: float32, scalars of the update.
        ids: int32 ``[n]``, from :func:`element_ids`; None for consecutive elements, which start at ``origin``.
        origin: int32 ``[4]``: position of the first element, hash of the parameter's name, and two numbers that align
            the origins of several pieces to 16 bytes, as kernels assume.
        key: int32 scalar, from :func:`rounding_key`.
        is_skipped: bool scalar on the device; nothing changes where it is True. None for a step that is taken.
    """
    if ids is None:
        start, name_hash, _, _ = origin.unbind()
        positions = torch.arange(weight.numel(), dtype=torch.int32, device=weight.device) + start
        ids = element_ids(positions, name_hash)
    bits = random_bits(ids, key)  # int32 [n], of which the weight and each state take others
    float32_states = [state.float() for state in states]
    new_weight, new_states = update(weight.float(), grad.float(), float32_states, scalars.unbind())
    _write(weight, new_weight, bits, 0, is_skipped)
    for draw, (state, new_state) in enumerate(zip(states, new_states, strict=True), start=1):
        _write(state, new_state, bits, draw, is_skipped)


@dataclass(frozen=True)
class GroupStep:
    """What the elements of a step share, if their parameters are of one group, one age and one device.

    Attributes:
        update: the update.
        scalars: float32, scalars of the update.
        key: int32 scalar, from :func:`rounding_key`.
        is_skipped: see :func:`step_elements`.
    """

    update: UpdateFunction
    scalars: Tensor
    key: Tensor
    is_skipped: Tensor | None = None


@dataclass
class Piece:
    """Elements of a parameter that are stepped together: flat tensors, which are changed in place.

    Attributes:
        weight: ``[n]``.
        grad: ``[n]``.
        states: ``[n]`` each, in the order of the update's.
    """

    weight: Tensor
    grad: Tensor
    states: list[Tensor]


def step_pieces(step: GroupStep, pieces: Sequence[Piece], origins: Tensor) -> None:
    """Step pieces of consecutive elements: many share the launch of a kernel where there are launches.

    Args:
        step: what the pieces share.
        pieces: the pieces.
        origins: int32 ``[len(pieces), 4]``; see :func:`step_elements`.
    """
    num_bundled = 0
    if bundled_step.pays(pieces):
        num_bundled = bundled_step(step, pieces, origins)
    single_pieces = pieces[num_bundled:]  # all, without launches; after a failure of the compiler, those not bundled
    single_origins = origins[num_bundled:].unbind()
    for piece, origin in zip(single_pieces, single_origins, strict=True):
        step_piece(step, piece, origin)


def step_piece(step: GroupStep, piece: Piece, origin: Tensor, ids: Tensor | None = None) -> None:
    """Step one piece, compiled once that pays; see :func:`step_elements` for ``origin`` and ``ids``."""
    fused_step(
        step.update,
        piece.weight,
        piece.grad,
        piece.states,
        step.scalars,
        ids,
        origin,
        step.key,
        step.is_skipped,
    )


def step_bundle(
    update: UpdateFunction,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    scalars: Tensor,
    origins: Tensor,
    key: Tensor,
    is_skipped: Tensor | None,
) -> None:
    """Step :data:`BUNDLE` pieces; see :func:`step_elements`."""
    for index, origin in enumerate(origins.unbind()):
        step_elements(update, weights[index], grads[index], states[index], scalars, None, origin, key, is_skipped)


def _write(stored: Tensor, values: Tensor, bits: Tensor, draw: int, is_skipped: Tensor | None) -> None:
    """Write float32 values to a stored tensor, stochastically rounded if it is bfloat16; see :func:`rounding_noise`."""
    if stored.dtype == torch.bfloat16:
        noise = rounding_noise(bits, draw)
        values = round_to_bfloat16(values, noise)
    if is_skipped is not None:
        values = torch.where(is_skipped, stored, values)
    stored.copy_(values)


class CompiledWhenItPays:
    """Function that compiles itself once its calls have taken as long as a compiler would.

    A short run never waits for the compiler, and a long run loses at most twice what a run that knew its length would.
    On a CPU compiled and uncompiled results are compared before the switch; a run whose compiler fails, or rounds
    differently, goes on uncompiled. Other devices compile at the first call, because their compilers fuse products with
    sums: a switch in the middle would be visible.

    Args:
        function: changes tensors in place and returns None. Its first argument is a Python function.
        seconds: time after which to compile.
    """

    def __init__(self, function: Callable[..., None], seconds: float = 20.0) -> None:
        self._function = function
        self._seconds_left = seconds
        self._compiled: Callable[..., None] | None = None
        self._is_decided = False

    @property
    def is_compiled(self) -> bool:
        """Whether calls run the compiled function."""
        return self._compiled is not None

    def __call__(self, *args: Any) -> None:
        """Call the function, compiled or not, or compile it first."""
        if is_simulated():
            self._simulate(*args)
        elif self._compiled is not None:
            try:
                self._compiled(*map(_without_base, args))
            # Arguments of another kind are compiled again. The compiler fails before anything is computed.
            except compiler_errors() as error:
                self._compiled = None
                self._log_failure(error)
                self._function(*args)
        elif self._is_decided:  # the compiler is missing, has failed, or rounds differently
            self._function(*args)
        elif self._seconds_left <= 0 or not computes_on_cpu(args[1].device):
            self._compile(*args)
        else:
            start = time.perf_counter()
            self._function(*args)
            self._seconds_left -= time.perf_counter() - start

    def _simulate(self, *args: Any) -> None:
        """Call the function on fake tensors; for large ones, only read and write all tensors, as a compiled step does.

        A compiled step has no temporary tensors, whose memory the uncompiled function would count.
        """
        if args[1].numel() <= _SIMULATED_UNCOMPILED:
            self._function(*args)
            return
        for tensor in _tensors(args):
            tensor.copy_(tensor)

    def _compile(self, *args: Any) -> None:
        """Compile the function, call it once, and decide whether to use it from now on; called once, when it pays.

        Only a CPU has uncompiled steps before, with which the compiled ones must agree: other devices compile at once.
        """
        self._is_decided = True
        parameter = args[1]  # behind a number or a function of Python
        on_cpu = computes_on_cpu(parameter.device)
        if on_cpu and not has_cpp_compiler():
            self._function(*args)
            return
        options: dict[str, Any] | None = None
        if on_cpu and torch.backends.cpu.get_cpu_capability() == "AVX512":
            # A vector of float32 becomes one of int32 through an array on the stack. The C++ compiler removes arrays of
            # 16 elements, which two vectors of 256 bits are, and keeps the arrays of 32 elements that AVX-512 would
            # take: with 256 bits, a step takes 0.62 times as long.
            options = {"cpp.simdlen": 256}
        reference_args: Sequence[Any] = ()
        if on_cpu:
            # The function changes its arguments: the uncompiled call, to compare with, needs copies of them.
            reference_args = _copies(args)
        compiled = torch.compile(self._function, dynamic=True, fullgraph=True, options=options)
        try:
            with one_compiler_thread():
                compiled(*map(_without_base, args))  # views would be recompiled for every shape of their base
        except compiler_errors() as error:
            self._log_failure(error)
            self._function(*args)
            return
        if on_cpu:
            self._function(*reference_args)
            if not _are_equal(args, reference_args):
                get_logger().info("The optimizer step stays uncompiled: the compiler rounds differently.")
                for tensor, reference in zip(_tensors(args), _tensors(reference_args), strict=True):
                    tensor.copy_(reference)
                return
        self._compiled = compiled

    @staticmethod
    def _log_failure(error: Exception) -> None:
        get_logger().info(f"The optimizer step stays uncompiled: {first_line(error)}")


class BundledStep:
    """Steps of :data:`BUNDLE` pieces in one launch, compiled by inductor, which combines kernels that are independent.

    The pieces have any sizes, so one compiled function serves all bundles. A kernel of so many pieces takes the
    compiler about half a minute once per machine, four times as long as that of one piece.
    """

    def __init__(self) -> None:
        self._compiled: Callable[..., None] | None = None
        self._has_failed = False
        # Pieces of zeros, by the layout of the pieces that they stand beside: an update, and the dtypes of its tensors.
        self._fillers: dict[Hashable, list[Piece]] = {}

    def pays(self, pieces: Sequence[Piece]) -> bool:
        """Return whether to bundle the pieces of a step: it launches kernels, at least twice as many as a bundle."""
        if len(pieces) < 2 * BUNDLE or self._has_failed or is_simulated():
            return False
        return pieces[0].weight.device.type == "cuda"

    def __call__(self, step: GroupStep, pieces: Sequence[Piece], origins: Tensor) -> int:
        """Step the pieces; see :func:`step_pieces`.

        Returns:
            Number of pieces that were stepped: all, or fewer if the compiler fails.
        """
        if self._compiled is None:
            self._compiled = torch.compile(step_bundle, dynamic=True, fullgraph=True, options=_bundle_options())
        # The pieces of a bundle have the same update and dtypes.
        tensors = (pieces[0].weight, pieces[0].grad, *pieces[0].states)
        layout = (step.update, pieces[0].weight.device, tuple(tensor.dtype for tensor in tensors))
        if layout not in self._fillers:
            fillers = []
            for index in range(BUNDLE):
                # The compiler takes sizes that are equal in the first call for equal in all calls: these all differ.
                size = 1003 + 2 * index
                states = [state.new_zeros(size) for state in pieces[0].states]
                fillers.append(Piece(pieces[0].weight.new_zeros(size), pieces[0].grad.new_zeros(size), states))
            self._fillers[layout] = fillers
            filler_origins = origins.new_zeros(BUNDLE, origins.shape[1])
            self._step_or_fail(step, self._fillers[layout], filler_origins)  # compiles; the loop sees a failure
        for first in range(0, len(pieces), BUNDLE):
            if self._has_failed:
                return first
            bundle = list(pieces[first : first + BUNDLE])
            # The last bundle begins with pieces of zeros, which take the origins of pieces of the bundle before: zeros
            # need no particular ones, and `pays` ensures that there is a bundle before.
            num_missing = BUNDLE - len(bundle)
            bundle = self._fillers[layout][:num_missing] + bundle
            start = first - num_missing
            if not self._step_or_fail(step, bundle, origins[start : start + BUNDLE]):
                return first
        return len(pieces)

    def _step_or_fail(self, step: GroupStep, bundle: Sequence[Piece], origins: Tensor) -> bool:
        """Step one bundle; return False if the compiler fails, which it does before anything is computed."""
        weights = [_without_base(piece.weight) for piece in bundle]
        grads = [_without_base(piece.grad) for piece in bundle]
        states = [_without_base(piece.states) for piece in bundle]
        origins = _without_base(origins)
        try:
            with one_compiler_thread():
                self._compiled(step.update, weights, grads, states, step.scalars, origins, step.key, step.is_skipped)
        except compiler_errors() as error:
            self._has_failed = True
            get_logger().info(f"Pieces of the optimizer step are not bundled: {first_line(error)}")
            return False
        return True


def _bundle_options() -> dict[str, Any]:
    """Return inductor's settings with which a bundle is one kernel; a release that lacks some launches more kernels."""
    options = {
        "combo_kernels": True,
        "combo_kernels_autotune": 0,
        "combo_kernel_max_num_nodes": BUNDLE,
        "combo_kernel_max_num_args": 1000,
        # A step allocates nothing, but inductor's estimate of its peak memory forbids to combine its kernels.
        "combo_kernel_peak_memory_pct_threshold": None,
    }
    available = compiler_options()
    return {name: value for name, value in options.items() if name in available}


def _without_base(arg: Any) -> Any:
    """Return a tensor with the memory of ``arg`` that is not a view, or a list of them.

    A compiled function is compiled again for every shape of the tensors that its arguments are views of.
    """
    if isinstance(arg, list):
        return [_without_base(item) for item in arg]
    if not isinstance(arg, Tensor):
        return arg
    tensor = torch.empty(0, dtype=arg.dtype, device=arg.device)
    return tensor.set_(arg.untyped_storage(), arg.storage_offset(), arg.shape, arg.stride())


def _copies(args: Sequence[Any]) -> list[Any]:
    """Copy tensors, and lists of tensors."""
    copies: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            copies.append(arg.clone())
        elif isinstance(arg, list):
            copies.append(_copies(arg))
        else:
            copies.append(arg)
    return copies


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of arguments, and of lists of tensors in them."""
    tensors: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, list):
            tensors += _tensors(arg)
    return tensors


def _are_equal(args: Sequence[Any], reference_args: Sequence[Any]) -> bool:
    """Return whether all tensors are equal bit for bit, NaN included."""
    for tensor, reference in zip(_tensors(args), _tensors(reference_args), strict=True):
        if not torch.equal(_as_bytes(tensor), _as_bytes(reference)):
            return False
    return True


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor, uint8 ``[bytes]``: NaN, which equals nothing, has bits that are equal."""
    return tensor.reshape(-1).view(torch.uint8)


def piece_size(device: torch.device) -> int:
    """Return the number of elements to step at a time; temporary memory is a few times as many float32 values.

    The number is a multiple of the block size of low-bit states.
    """
    if computes_on_cpu(device):
        return 2**20
    return 2**23  # a launch must be short beside its work


def rounded_piece_size(device: torch.device) -> int:
    """Return the number of elements to step at a time with an update of this library's.

    Compiled, it has no temporary tensors. Uncompiled, it has a dozen, which fit in a CPU core's cache.
    """
    if is_simulated():
        return sys.maxsize
    if fused_step.is_compiled:
        return piece_size(device)
    return piece_size(device) // 4


# All optimizers of a process share them: with a step in the backward pass, each parameter has an optimizer.
fused_step = CompiledWhenItPays(step_elements)
bundled_step = BundledStep()
