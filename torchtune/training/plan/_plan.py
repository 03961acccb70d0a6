"""The memory that a run needs, estimated before anything is loaded.

The estimate, in bytes, for a run on one device (numel: elements; T = batch_size * max_seq_len tokens, at most):

- weights: numel of every parameter times its size.
- gradients: numel of every trained parameter times its size; of the largest one alone if the optimizer steps in the
  backward pass.
- optimizer: numel of every trained parameter times the bytes of state that one step of this very optimizer, prepared
  as the run prepares it, leaves for an element of a small matrix.
- activations of a layer, by token: what its products, its norms, attention and the gated MLP keep for the backward
  pass, ``4 d + 2 q + 4 kv + 4 i`` elements (d: width, q and kv: widths of queries and keys, i: width of the MLP).
  A layer with a mixer in the place of attention keeps its projections three times, its output and
  gate, and a float32 state for every 64 positions. Times the layers without activation checkpointing; with it, ``d``
  by recomputed layer and one layer whole. Selective checkpointing by operator keeps about half of the products: half
  of ``4 d + 2 q + 4 kv + 4 i``.
- loss: a chunk of logits, a block of them in float32 and its gradient, and the gradient of a trained output, which
  the loss makes in the forward pass (in float32 as well if there are several chunks).

The most is needed at one of two moments. When the loss is done, all activations live, and of the gradients only those
of earlier micro-batches. When the backward pass ends, all gradients live and no activations but those of a layer.

With several processes, weights, gradients and optimizer state are divided by the data-parallel shards, the context
parallel and the tensor parallel size; activations and logits by the context and tensor parallel sizes. What FSDP holds
whole comes on top, divided by the tensor parallel size: the embeddings and the output at the first moment, and, where
they are trained, their gradients and a float32 buffer to reduce them at the second; or those of two layers, if more.

Attention scores, the slack of the allocator and the CUDA context (some hundred MiB) come on top.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchtune.config._locate import locate
from torchtune.modules.conversion import full_shapes
from torchtune.modules.loss._linear_cross_entropy import LOGITS_BLOCK
from torchtune.modules.loss.cross_entropy_loss import rows_of_a_chunk
from torchtune.modules.peft import owned_parameters
from torchtune.modules.transformer import text_decoder
from torchtune.training._settings_view import RecipeSettingsError, SettingsView
from torchtune.training.optim._grouped_optimizer import GroupedOptimizer
from torchtune.training.optim._low_precision_optimizer import HALF
from torchtune.training.optim._prepare_optimizer import prepare_optimizer
from torchtune.training.parallel._parallel_dims import ParallelDims, ParallelDimsError
from torchtune.training.plan._elements import elements_per_token, image_elements
from torchtune.training.precision import (
    PRECISION_STR_TO_DTYPE,
    computes_fast,
    emulation_warning,
    set_default_dtype,
)
from torchtune.utils._device import parse_device

_PROBE_SHAPE = (128, 128)
_ASSUMED_LENGTH = 2048


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run needs, by component.

    Attributes:
        weights, gradients, optimizer: while they are kept.
        activations: of all layers, when the loss is done.
        loss: what the loss takes beside them.
        of_a_layer: activations of the layer that is in the backward pass.
        gathered: what FSDP holds whole when the loss is done.
        reduced: what FSDP holds whole when the backward pass ends.
        accumulates: whether gradients are kept from one micro-batch to the next.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    of_a_layer: int = 0
    gathered: int = 0
    reduced: int = 0
    accumulates: bool = False
    teacher: int = 0

    @property
    def offloaded(self) -> "MemoryEstimate":
        """What is left on a device if weights, gradients and states of the optimizer lie in host memory."""
        return dataclasses.replace(self, weights=0, gradients=0, optimizer=0, teacher=0)

    @property
    def total(self) -> int:
        """The most that is needed at a time."""
        earlier = self.gradients if self.accumulates else 0
        forward = earlier + self.activations + self.loss + self.gathered
        backward = self.gradients + max(self.of_a_layer, self.reduced)
        return self.weights + self.teacher + self.optimizer + max(forward, backward)

    def share(self, dims: ParallelDims, gathered: tuple[int, int], *, offload: bool = False) -> "MemoryEstimate":
        """What each of several processes needs.

        Args:
            dims: the processes.
            gathered: bytes that are whole at a time, when the loss is done and when the backward pass ends.
            offload: whether parameters are kept in host memory, so that these are copies.
        """
        shards, parts = dims.dp_shard * dims.cp * dims.tp, dims.cp * dims.tp
        whole = shards > dims.tp or offload
        sharded = {name: -(-getattr(self, name) // shards) for name in ("weights", "gradients", "optimizer", "teacher")}
        split = {name: -(-getattr(self, name) // parts) for name in ("activations", "loss", "of_a_layer")}
        forward, backward = (size // dims.tp if whole else 0 for size in gathered)
        return dataclasses.replace(self, **sharded, **split, gathered=forward, reduced=backward)


def optimizer_bytes_per_element(
    cfg: Any, dtype: torch.dtype, precision: str, model: torch.nn.Module | None = None
) -> float:
    """Bytes of optimizer state per trained element, measured by one step on a matrix.

    Optimizers with parameter groups have the mean of the groups. Optimizers with offloaded state or for CUDA only are
    not run: those of bitsandbytes count by the bits in their names, offloaded state as 0.

    Args:
        cfg: component node of the optimizer.
        dtype: of the weights.
        precision: see ``prepare_optimizer``.
        model: with the trained parameters, for an optimizer that groups them by name.
    """
    from torchtune import config

    path = str(cfg.get("_component_"))
    if path.startswith("bitsandbytes.") or path.endswith(".CPUOffloadOptimizer"):
        locate(path)
        return 0.0 if path.endswith("Optimizer") else 2.0 if "8bit" in path else 8.0
    probe = torch.nn.Linear(*_PROBE_SHAPE, bias=False, device="cpu", dtype=dtype)
    made = config.instantiate(cfg, list(probe.parameters()))
    if not isinstance(made, GroupedOptimizer):
        return _state_bytes(made, probe, precision)
    if model is None:
        return 0.0
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    made.assign(named, model, quiet=True)
    total = 0.0
    for members in made.members().values():
        made.adopt(probe.weight, members[0])
        numel = sum(parameter.numel() for parameter in members)
        total += numel * _state_bytes(made.make([probe.weight]), probe, precision)
    return total / max(sum(parameter.numel() for _, parameter in named), 1)


def _state_bytes(optimizer: torch.optim.Optimizer, probe: torch.nn.Linear, precision: str) -> float:
    optimizer = prepare_optimizer(optimizer, probe, precision, seed=0)
    probe.weight.grad = torch.ones_like(probe.weight)
    with torch.compiler.set_stance("force_eager"):  # optimizers that compile themselves need not do so here
        optimizer.step()
    states = optimizer.state_dict()["state"].values()
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(_num_bytes(value) for value in kept if value.dim() > 0) / probe.weight.numel()


def _num_bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # quantised: count what is really kept
        return sum(_num_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def estimate_memory(
    model: torch.nn.Module,
    *,
    num_tokens: int,
    state_bytes: float,
    checkpointing: bool | int | str,
    in_backward: bool,
    num_output_chunks: int,
    accumulates: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of training ``model``, which may lie on the meta device; the formulas are at the top.

    Args:
        model: converted, with what is trained requiring gradients.
        num_tokens: tokens of one micro-batch.
        state_bytes: optimizer state by trained element.
        checkpointing: whether activations of layers are recomputed; n: those of every n-th; ``op``: some of each.
        in_backward: whether the optimizer steps in the backward pass.
        num_output_chunks: chunks of the loss.
        accumulates: whether a step has several micro-batches.
    """
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [_num_bytes(parameter) for parameter in trained]
    size = parameters[0].element_size()
    by_layer, width, layers = elements_per_token(model)
    if checkpointing == "op":
        by_token = by_layer + (width + by_layer // 2) * layers
    else:
        recomputed = layers // int(checkpointing) if checkpointing else 0
        by_token = by_layer * (layers - recomputed + bool(recomputed)) + width * recomputed
    return MemoryEstimate(
        weights=sum(map(_num_bytes, parameters)),
        gradients=max(gradients, default=0) if in_backward else sum(gradients),
        optimizer=round(state_bytes * sum(parameter.numel() for parameter in trained)),
        activations=num_tokens * by_token * size,
        loss=_loss_bytes(model, num_tokens, num_output_chunks, size),
        of_a_layer=num_tokens * by_layer * size,
        accumulates=accumulates,
    )


def _loss_bytes(model: torch.nn.Module, num_tokens: int, num_output_chunks: int, size: int) -> int:
    """Chunks of logits as ``LinearCrossEntropyLoss`` makes them, and the gradient of the output."""
    decoder = text_decoder(model)
    if not hasattr(decoder, "tok_embeddings"):
        return 0
    tied = getattr(getattr(decoder, "output", None), "weight", None)
    output = decoder.tok_embeddings.weight if tied is None else tied
    trained = output if output.requires_grad else None
    rows = min(num_tokens, rows_of_a_chunk(num_tokens, num_output_chunks, trained))
    logits = rows * decoder.tok_embeddings.weight.shape[0]
    gradient = 0 if trained is None else output.numel() * (size + (4 if rows < num_tokens and size < 4 else 0))
    return logits * size + 2 * 4 * min(logits, LOGITS_BLOCK) + gradient


def _gathered_bytes(model: torch.nn.Module, dims: ParallelDims) -> tuple[int, int]:
    """What FSDP holds whole: (parameters outside of the layers, or of two layers; gradients and their buffer)."""
    layers = list(getattr(text_decoder(model), "layers", []))
    every = [module for name, module in model.named_modules() if _is_layer(name)]  # an encoder has some as well
    inner = {id(parameter) for layer in every for parameter in layer.parameters()}
    outer = [parameter for parameter in model.parameters() if id(parameter) not in inner]
    first = [parameter for layer in layers[:2] for parameter in layer.parameters()]
    distributed = _distributed_experts(model, dims)

    def kept(parameters: list[torch.nn.Parameter]) -> int:
        return sum(_num_bytes(p) // distributed.get(id(p), 1) for p in parameters)

    def reduced(parameters: list[torch.nn.Parameter]) -> int:
        trained = [p for p in parameters if p.requires_grad]
        return sum((_num_bytes(p) + 4 * p.numel()) // distributed.get(id(p), 1) for p in trained)

    own, two = kept(outer), kept(first)
    return own + (0 if own else two), max(reduced(outer), own + two + reduced(first) // 2)


def _is_layer(name: str) -> bool:
    *_, parent, last = ["", *name.split(".")]
    return parent == "layers" and last.isdigit()


def _distributed_experts(model: torch.nn.Module, dims: ParallelDims) -> dict[int, int]:
    """The parameters of experts, by identity, and by how many ranks they are divided while they are gathered."""
    from torchtune.modules.moe import GroupedExperts

    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)] if dims.ep > 1 else []
    return {id(parameter): dims.ep for module in experts for parameter in module.parameters()}


def arrange(settings: SettingsView, processes: int) -> ParallelDims:
    """The device mesh of a recipe.

    Raises:
        ParallelDimsError: the sizes do not fit the number of processes.
        RecipeSettingsError: there are several processes, and the dataclass of a training recipe does not say how.
    """
    if "data_parallel_shard_dim" not in settings.declared:
        trains = "optimizer" in settings.declared  # what else several processes do is a recipe's own affair
        if processes > 1 and trains and dataclasses.is_dataclass(settings.source):
            raise RecipeSettingsError(
                f"the recipe runs on one device, but there are {processes} processes: start one, or declare "
                "data_parallel_shard_dim and the other settings of the mesh, as full_finetune_distributed does."
            )
        return ParallelDims()
    return ParallelDims(
        dp_replicate=settings.data_parallel_replicate_dim,
        dp_shard=settings.data_parallel_shard_dim,
        tp=settings.tensor_parallel_dim,
        cp=settings.context_parallel_dim,
        ep=settings.expert_parallel_dim,
        world_size=processes,
    )


def _place(settings: SettingsView) -> str:
    return " (weights, gradients and optimizer in host memory)" if settings.fsdp_cpu_offload else ""


def _row_length(settings: SettingsView, model: torch.nn.Module) -> tuple[int, str]:
    """(tokens of the longest row, what to say about it)."""
    if settings.max_seq_len:
        return settings.max_seq_len, "at most"
    longest = min(_ASSUMED_LENGTH, getattr(model, "max_seq_len", None) or _ASSUMED_LENGTH)
    return longest, "(tokenizer.max_seq_len is not set, so this is a guess)"


def _show(number_of_bytes: float) -> str:
    return f"{number_of_bytes / 2**30:8.2f} GiB"


def build_on_meta(settings: SettingsView) -> tuple[torch.nn.Module, torch.dtype, list[Any]]:
    """(model on the meta device, dtype of its weights, reports of the conversions)."""
    from torchtune import config
    from torchtune.modules.conversion import apply_conversions

    dtype = PRECISION_STR_TO_DTYPE[settings.resolved_dtype()]
    with set_default_dtype(dtype), torch.device("meta"):
        model = config.instantiate(settings.model)
        return model, dtype, apply_conversions(model, [config.instantiate(node) for node in settings.model_converters])


def _frozen_bytes(settings: SettingsView, model: torch.nn.Module, build: Callable[[SettingsView], Any]) -> int:
    """Bytes of the weights of other models: a teacher, those of PPO, or the reference of a loss that needs one."""
    from torchtune import config

    if settings.teacher_cache is None and (others := settings.other_models()):
        frozen = [build(other) for name, (_, other) in others.items() if name != "value"]
        return sum(_num_bytes(parameter) for one in frozen for parameter in one.parameters())
    if "ref_checkpointer" not in settings.declared or settings.reference_cache is not None or settings.loss is None:
        return 0
    if not getattr(config.instantiate(settings.loss), "needs_reference", False):
        return 0
    # Without its adapters a model is its own reference; of one with other trained weights a copy is kept.
    own = {id(model.get_parameter(name)) for name in owned_parameters(model)}
    is_changed = any(parameter.requires_grad and id(parameter) not in own for parameter in model.parameters())
    return sum(map(_num_bytes, model.parameters())) if is_changed or settings.ref_checkpointer is not None else 0


def _recomputed(settings: SettingsView) -> bool | int | str:
    """Which layers use activation checkpointing, as :func:`estimate_memory` takes it."""
    if settings.ac_mode != "selective":
        return settings.enable_activation_checkpointing or settings.ac_mode == "full"
    return "op" if settings.ac_option == "op" else int(settings.ac_option)


def _estimate(
    settings: SettingsView,
    model: torch.nn.Module,
    state_bytes: float,
    build: Callable[[SettingsView], Any] = lambda settings: build_on_meta(settings)[0],
) -> MemoryEstimate:
    """Memory of a run on one process; ``build`` makes a second model on the meta device."""
    found = estimate_memory(
        model,
        num_tokens=settings.batch_size * _row_length(settings, model)[0],
        state_bytes=state_bytes,
        checkpointing=_recomputed(settings),
        in_backward=settings.optimizer_in_bwd,
        num_output_chunks=(settings.loss.get("num_output_chunks") if settings.loss is not None else None) or 8,
        accumulates=settings.gradient_accumulation_steps > 1,
    )
    if settings.reward_and_value_model is not None:
        _, other = settings.other_models()["value"]
        value = _estimate(other, build(other), state_bytes, build)
        names = ("weights", "gradients", "optimizer", "activations")
        found = dataclasses.replace(found, **{name: getattr(found, name) + getattr(value, name) for name in names})
    images = settings.batch_size * image_elements(model, recomputed=bool(_recomputed(settings)))
    images *= next(model.parameters()).element_size()
    teacher = _frozen_bytes(settings, model, build)
    return dataclasses.replace(found, teacher=teacher, activations=found.activations + images)


class ClosedForm:
    """The estimates of many settings of a recipe; what they share is built once.

    Attributes:
        smallest: (bytes, name) of the smallest estimate.
    """

    def __init__(self) -> None:
        self.smallest: tuple[int, str] | None = None
        self._models: dict[str, tuple[torch.nn.Module, torch.dtype]] = {}
        self._states: dict[str, float] = {}

    def model(self, settings: Any) -> tuple[torch.nn.Module, torch.dtype]:
        """The model of a run on the meta device, and the dtype of its weights."""
        cfg = SettingsView.of(settings)
        key = self._key(cfg)
        if key not in self._models:
            self._models[key] = build_on_meta(cfg)[:2]
        return self._models[key]

    @staticmethod
    def _key(cfg: SettingsView) -> str:
        return repr((cfg.model, cfg.model_converters, cfg.resolved_dtype()))

    def estimate(self, settings: Any, processes: int, what: str = "") -> MemoryEstimate:
        """Memory of each of several processes of a training run; parameters in host memory are not counted.

        Args:
            settings: see :func:`plan_run`.
            processes: of the run.
            what: name of the settings.

        Raises:
            ParallelDimsError, RecipeSettingsError: the mesh does not fit the number of processes.
        """
        cfg = SettingsView.of(settings)
        dims, (model, dtype) = arrange(cfg, processes), self.model(cfg)
        key = self._key(cfg) + repr((cfg.optimizer, cfg.optimizer_precision))
        if key not in self._states:
            self._states[key] = optimizer_bytes_per_element(cfg.optimizer, dtype, cfg.optimizer_precision, model)
        offload = cfg.fsdp_cpu_offload and processes > 1
        whole = _estimate(cfg, model, self._states[key], lambda other: self.model(other)[0])
        found = whole.share(dims, _gathered_bytes(model, dims), offload=offload)
        found = found.offloaded if offload else found
        if self.smallest is None or found.total < self.smallest[0]:
            self.smallest = found.total, what
        return found


def memory_by_processes(settings: Any, counts: Sequence[int]) -> dict[int, MemoryEstimate]:
    """Memory of each process of a training run, by number of processes; the mesh leaves out those that do not fit it.

    Args:
        settings: see :func:`plan_run`.
        counts: numbers of processes.
    """
    settings = SettingsView.of(settings)
    model, dtype, _ = build_on_meta(settings)
    state_bytes = optimizer_bytes_per_element(settings.optimizer, dtype, settings.optimizer_precision, model)
    whole, found = _estimate(settings, model, state_bytes), {}
    for count in counts:
        try:
            dims = arrange(settings, count)
        except (ParallelDimsError, RecipeSettingsError):
            continue
        found[count] = whole.share(dims, _gathered_bytes(model, dims), offload=settings.fsdp_cpu_offload)
    return found


def plan_run(settings: Any, processes: int = 1) -> str:
    """Describe a run: parameters, types, mesh and memory by component. Nothing is loaded and no file is opened.

    Args:
        settings: of a recipe. ``SettingsView`` has the names that are read; a recipe that does not train declares
            those of the model alone.
        processes: of the run.

    Returns:
        Text of about ten lines.

    Raises:
        RecipeSettingsError: a name that the library reads is missing, or its value has another type.
        ParallelDimsError: the mesh does not fit the number of processes.
    """
    settings = SettingsView.of(settings)
    dims = arrange(settings, processes)
    model, dtype, reports = build_on_meta(settings)
    total = sum(map(math.prod, full_shapes(model).values()))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = trained / max(total, 1)
    lines = [
        f"model       {settings.model.get('_component_')}, {str(dtype).removeprefix('torch.')}",
        *(f"{name:<12}{other.model.get('_component_')}" for name, (_, other) in settings.other_models().items()),
        f"parameters  {total:,}" + (f", of which {trained:,} are trained ({share:.2%})" if settings.optimizer else ""),
        *(f"converted   {report}" for report in reports),
        f"mesh        {dims}, device {settings.device or 'chosen at start'}",
    ]
    device = parse_device(settings.device)
    if not computes_fast(dtype, device):
        lines.append(emulation_warning(settings.resolved_dtype(), device))
    if settings.optimizer is None:
        return "\n".join([*lines, f"memory      {_show(sum(map(_num_bytes, model.parameters())))} of weights"])

    precision = settings.optimizer_precision
    state_bytes = optimizer_bytes_per_element(settings.optimizer, dtype, precision, model)
    batch_size, (length, remark) = settings.batch_size, _row_length(settings, model)
    gathered, offload = _gathered_bytes(model, dims), settings.fsdp_cpu_offload
    estimate = _estimate(settings, model, state_bytes).share(dims, gathered, offload=offload)
    optimizer_name = str(settings.optimizer.get("_component_")).rpartition(".")[2]
    second = "reference" if settings.teacher_model is None else "teacher"
    second = second if settings.reward_and_value_model is None else "frozen"
    if all(parameter.dtype not in HALF for parameter in model.parameters() if parameter.requires_grad):
        precision = "fp32"  # nothing is rounded
    recomputed = "recomputed in the backward pass" if _recomputed(settings) else "all kept"
    recomputed += "" if text_decoder(model) is model else ", of one image a row"
    return "\n".join(
        [
            *lines,
            f"micro-batch {batch_size} x {length} = {batch_size * length:,} tokens {remark}",
            "memory, estimated:" if dims.world_size == 1 else f"memory of each process, estimated{_place(settings)}:",
            f"  weights     {_show(estimate.weights)}",
            f"  gradients   {_show(estimate.gradients)}",
            f"  optimizer   {_show(estimate.optimizer)}  {optimizer_name}, {precision}, {state_bytes:.1f} bytes each",
            f"  activations {_show(estimate.activations)}  {recomputed}",
            f"  loss        {_show(estimate.loss)}  logits of a chunk, gradient of the output",
            *([f"  gathered    {_show(estimate.gathered)}  embeddings and output"] if estimate.gathered else []),
            *([f"  {second:<12}{_show(estimate.teacher)}  its weights"] if estimate.teacher else []),
            f"  total       {_show(estimate.total)}  at the same time, and some hundred MiB for the framework",
        ]
    )
