"""Count what a micro-batch asks of a CUDA device: launches, host waits, copies, compiled graphs, peak memory.

    python benchmarks/count_cuda.py                                # all rows, as JSON
    python benchmarks/count_cuda.py qwen3 gemma2 --methods full    # some rows
    python benchmarks/count_cuda.py --compile > counts.jsonl       # with graphs of compiled layers, slower
    python benchmarks/count_cuda.py --table counts.jsonl           # docs/tables/cuda_counts.rst of these rows

Nothing is timed, so a count does not depend on the card's clock or on what else it runs. Every family of the library is
built with the width of its smallest model, with few layers and experts, and random weights; the same shape is built
with transformers (and peft), and both take the same tokens in the same process.

- A launch is an operator that torch's dispatcher hands to the device below autograd (views, allocations and copies from
  the host are none), or a kernel of torch's compiler. Most operators launch one kernel, some several; torch's profiler,
  which would count kernels, needs CUPTI.
- A host wait is an operator at which torch's debug mode reports that the host waits for the device, or a call of
  ``synchronize`` of a device, stream or event.
- Peak memory is the maximum that torch's allocator has given out, above the weights.
- Graphs, breaks and late compilations are those of dynamo; the graphs themselves run uncompiled.
"""

import argparse
import dataclasses
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu_cases import RANK, Case, draw_step
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune import rlhf, training
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, collate_preference
from torchtune.models import Description, ModelSpec, build, get_spec, list_specs
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.loss import setup_loss as setup_cross_entropy
from torchtune.modules.low_precision import QuantizeBase
from torchtune.modules.peft import LoRA, get_adapter_params
from torchtune.rlhf.loss import DPOLoss, GRPOLoss, setup_loss

TABLE = Path(__file__).parents[1] / "docs" / "tables" / "cuda_counts.rst"
METHODS = ("full", "lora", "qlora", "dpo", "grpo")
# Methods other than full and LoRA do not depend on the family's layers: these families stand for all.
FAMILIES_OF_ALL_METHODS = ("llama3_2", "qwen3_moe")
# Families whose builders take a config only -> its class in transformers.
CONFIGS = {"falcon_h1": "FalconH1Config", "hunyuan": "HunYuanDenseV1Config"}
PACK, PACKS = 512, 2
LAYERS, EXPERTS, VOCABULARY = 4, 16, 32_768
MIB = 2**20


# What operators do
# -----------------

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# Views without saying so, or reads by the host, which are counted as waits.
_NO_LAUNCHES = {"_unsafe_view", "_reshape_alias", "_local_scalar_dense", "is_pinned"}
# `lift_fresh` is what `torch.tensor(..., device="cuda")` shows: the copy itself is hidden from modes.
_COPIES = {"copy_", "_to_copy", "lift_fresh", "_pin_memory", "_copy_from"}


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _is_view(operator: Any) -> bool:
    """Whether an operator only makes another view of its input."""
    returned = operator._schema.returns
    return bool(returned) and all(value.alias_info is not None and not value.alias_info.is_write for value in returned)


class Operators(TorchDispatchMode):
    """Counts operators by what they ask of the device.

    Attributes:
        counts: number of launches, by the name of the part in which they fell.
        copies: number of copies from the host, likewise.
        names: number of launches by part and operator.
        part: name of the current part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.part = "other"

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let the compiler compile below this mode."""
        return True

    def launch(self, name: str) -> None:
        """Count a launch."""
        self.counts[self.part] += 1
        self.names[f"{self.part} {name}"] += 1

    def __enter__(self) -> "Operators":
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        run = CachingAutotuner.run

        def counted_run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.launch("compiled kernel")
            return run(kernel, *args, **kwargs)

        self._patch = mock.patch.object(CachingAutotuner, "run", counted_run)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "torchtune":
            # An operator of the library is not a launch, but the operators in it are.
            with self:
                return OPDEFS[operator._schema.name]._init_fn(*args, **(kwargs or {}))
        is_composite = operator.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
        if is_composite and not operator.has_kernel_for_dispatch_key(DispatchKey.CUDA):
            # Autograd takes such operators apart. In an operator of the library it does not run.
            with self:
                return operator.decompose(*args, **(kwargs or {}))
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        if name in _ALLOCATIONS or name in _NO_LAUNCHES or _is_view(operator):
            return result
        inputs = list(_tensors([args, list((kwargs or {}).values())]))
        outputs = list(_tensors(result))
        if not any(tensor.is_cuda for tensor in (*inputs, *outputs)):
            return result
        comes_from_host = name in _COPIES and any(not tensor.is_cuda and tensor.dim() for tensor in inputs)
        if name == "lift_fresh" or (comes_from_host and all(tensor.is_cuda for tensor in outputs)):
            self.copies[self.part] += 1
        elif all(tensor.is_cuda for tensor in outputs):
            self.launch(name)
        return result


@contextmanager
def watched_waits() -> Iterator[Counter[str]]:
    """Count the host's waits inside the block, by file and line."""
    waits: Counter[str] = Counter()

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            waits[f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"] += 1
            return function(*args, **kwargs)

        return call

    before = torch.cuda.get_sync_debug_mode()
    with ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            stack.enter_context(mock.patch.object(owner, "synchronize", counting(owner.synchronize)))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
            for warning in caught:
                if "called a synchronizing" in str(warning.message):
                    waits[f"{'/'.join(warning.filename.split('/')[-3:])}:{warning.lineno}"] += 1


# Models and batches
# ------------------


class Family(NamedTuple):
    """The smallest text model of a family.

    Attributes:
        description: the model, cut to few layers and experts.
        spec: the family.
        depth: number of layers of the whole model.
    """

    description: Description
    spec: ModelSpec
    depth: int


def families() -> dict[str, Family]:
    """Return the smallest text model of every family."""
    smallest = {}
    for name in list_specs():
        family = importlib.import_module(f"torchtune.models.{name}")
        sizes = [size for size in getattr(family, "SIZES", {}).values() if isinstance(size, Description)]
        spec = get_spec(name)
        if name in CONFIGS:
            import transformers

            sizes = [spec.from_hf_config(getattr(transformers, CONFIGS[name])().to_dict())]
        if sizes and spec.builder is None:  # families of images have the decoder of another family
            sizes.sort(key=lambda size: (size.num_layers * size.embed_dim * size.intermediate_dim, size.vocab_size))
            smallest[name] = Family(cut(sizes[0]), spec, sizes[0].num_layers)
    return smallest


def cut(description: Description) -> Description:
    """Return the description with few layers, experts and tokens, and every kind of layer that it has."""
    changes: dict[str, Any] = {"num_layers": min(LAYERS, description.num_layers)}
    changes["vocab_size"] = min(VOCABULARY, description.vocab_size)
    if description.layer_embed_vocab:
        changes["layer_embed_vocab"] = min(VOCABULARY, description.layer_embed_vocab)
    for field in dataclasses.fields(description):
        value = getattr(description, field.name)
        if field.name.endswith("_layers") and isinstance(value, tuple):
            changes[field.name] = tuple(layer for layer in value if layer < changes["num_layers"])
    if description.shared_kv_layers:
        changes["shared_kv_layers"] = 1
    if description.num_experts > EXPERTS:
        changes["num_experts"] = EXPERTS
        changes["experts_per_token"] = min(description.experts_per_token, EXPERTS // 2)
    return dataclasses.replace(description, **changes)


@torch.no_grad()
def randomize_trained(model: nn.Module) -> None:
    """Fill newly allocated weights; quantized ones keep what memory holds, of which no count depends."""
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(1.0)


def pairs(vocab_size: int) -> Batch:
    """Return a batch of preference pairs with as many tokens as a batch of packs."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(4):
        row = {}
        for kind in ("chosen", "rejected"):
            tokens = torch.randint(vocab_size, (PACK * PACKS // 8,), generator=generator).tolist()
            row[f"{kind}_input_ids"] = tokens
            row[f"{kind}_labels"] = [CROSS_ENTROPY_IGNORE_IDX] * 32 + tokens[33:] + [CROSS_ENTROPY_IGNORE_IDX]
        rows.append(row)
    return collate_preference(rows)


def answers(vocab_size: int) -> tuple[list[Batch], Tensor]:
    """Return a micro-batch of sampled answers for GRPO, and their tokens ``[answers, s]``."""
    generator = torch.Generator().manual_seed(0)
    length, prompt_length = PACK * PACKS // 8, 48
    prompt = torch.randint(vocab_size, (prompt_length,), generator=generator)
    rollouts = []
    for _ in range(8):
        answer = torch.randint(vocab_size, (length - prompt_length,), generator=generator)
        log_probs = torch.full((len(answer),), -1.0)
        rollouts.append(rlhf.Rollout(torch.cat([prompt, answer]), prompt_length, log_probs, True))
    advantages = [1.0 if index % 2 else -1.0 for index in range(len(rollouts))]
    batches, _, _ = rlhf.rollout_batches(
        rollouts, advantages, tokens_per_batch=PACK * PACKS, dims=training.ParallelDims(), blank=prompt.tolist()
    )
    return batches, torch.stack([rollout.tokens for rollout in rollouts])


def adapters_of(description: Description) -> LoRA:
    """Return adapters on attention, and on the MLP unless it has experts."""
    attention = ["q_proj", "k_proj", "v_proj", "output_proj"]
    return LoRA(rank=RANK, alpha=2 * RANK, attn_modules=attention, apply_to_mlp=not description.num_experts)


class OurSide:
    """Losses of this library, put together as in its recipes.

    Args:
        description: shape of the model.
        spec: its family.
        method: one of ``METHODS``; all but ``full`` train adapters.
        device: of the model.
    """

    def __init__(self, description: Description, spec: ModelSpec, method: str, device: torch.device) -> None:
        self.method, self.device = method, device
        with training.set_default_dtype(torch.bfloat16), torch.device("meta"):
            self.model = build(description, spec)
            if method != "full":
                quantize = [QuantizeBase()] if method == "qlora" else []
                apply_conversions(self.model, [*quantize, adapters_of(description)])
        self.model.to_empty(device=device)
        randomize_trained(self.model)
        self.model.train()
        self.layers = list(self.model.layers)
        if method == "dpo":
            self.loss_fn = setup_loss(DPOLoss(), self.model)
            self.reference = rlhf.Reference(self.loss_fn, self.model, training.ParallelDims())
            # Adapters of a new run compute zero, and the reference is the model without them. These are random.
            self.reference._initial_weights = None
        elif method == "grpo":
            self.loss_fn = setup_loss(GRPOLoss(), self.model)
        else:
            self.loss_fn = setup_cross_entropy(LinearCrossEntropyLoss(), self.model)

    def batch(self, index: int) -> Batch:
        """Return batch ``index`` on the host."""
        vocab_size = self.model.description.vocab_size
        if self.method == "dpo":
            return pairs(vocab_size)
        if self.method == "grpo":
            return answers(vocab_size)[0][0]
        return draw_step(Case("", "", False, PACK, PACKS), vocab_size, index)

    def loss(self, batch: Batch) -> Tensor:
        """Return the sum over the terms of the batch."""
        terms = batch.num_terms  # counted on the host
        batch = batch.to(self.device, non_blocking=True)
        if self.method == "dpo":
            reference, baseline = self.reference(batch)
        hidden = self.model(**batch.model_inputs(), output="hidden")
        if self.method == "dpo":
            scores = self.loss_fn.score(hidden, batch, self.model.output)
            total, _ = self.loss_fn.sum_and_metrics(batch, scores, reference, baseline)
        elif self.method == "grpo":
            scores = self.loss_fn.score(hidden, batch, self.model.output)
            total, _ = self.loss_fn.sum_and_metrics(batch, scores, None)
        else:
            total, _ = self.loss_fn.sum_and_count(hidden, batch.labels, self.model.output, index=batch.label_index)
        return total / terms

    def compile(self) -> None:
        """Compile the layers and the loss."""
        training.compile_model(self.model, verbose=False)
        training.compile_loss(self.loss_fn, verbose=False)


class TransformersSide:
    """The same shape in transformers, with peft, in a plain loop. See :class:`OurSide` for the arguments.

    A pack is one causal row, which needs fewer operators than documents.
    """

    def __init__(self, description: Description, spec: ModelSpec, method: str, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.method, self.device, self.vocab_size = method, device, description.vocab_size
        settings = spec.to_hf_config(description)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        model.generation_config = None  # of which peft would copy tokens that the small vocabulary lacks
        self.layers = list(model.model.layers) if hasattr(model, "model") else list(model.backbone.layers)
        if method != "full":
            from peft import LoraConfig, get_peft_model

            # The modules that our adapters adapt, by their names in transformers.
            with torch.device("meta"):
                ours = build(description, spec)
                apply_conversions(ours, [adapters_of(description)])
            weights = get_adapter_params(ours)
            names = spec.weight_map("hf").peft().to_external(weights.items(), description, partial=True)
            targets = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name, _ in names}
            adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=sorted(targets), task_type="CAUSAL_LM")
            model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
        self.model = model

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels of batch ``index``, as transformers takes them, on the host."""
        if self.method == "dpo":
            batch = pairs(self.vocab_size)
            tokens = batch.tokens.view(8, -1)
            labels = tokens.clone()
            labels[:, :33] = CROSS_ENTROPY_IGNORE_IDX
            return tokens, labels
        if self.method == "grpo":
            tokens = answers(self.vocab_size)[1]
            return tokens, tokens
        batch = draw_step(Case("", "", False, PACK, PACKS), self.vocab_size, index)
        ignored = batch.labels == CROSS_ENTROPY_IGNORE_IDX
        labels = torch.where(ignored, CROSS_ENTROPY_IGNORE_IDX, batch.tokens)
        return batch.tokens.view(PACKS, PACK), labels.view(PACKS, PACK)

    def _log_probs(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return log-probs of the labels ``[b, s - 1]``, 0 where there is none."""
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
        labels = labels[:, 1:]
        chosen = torch.log_softmax(logits.float(), -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return chosen * (labels != CROSS_ENTROPY_IGNORE_IDX)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean over the batch."""
        tokens, labels = (part.pin_memory().to(self.device, non_blocking=True) for part in batch)
        if self.method == "dpo":
            with torch.no_grad(), self.model.disable_adapter():
                reference = self._log_probs(tokens, labels).sum(-1)
            ratios = self._log_probs(tokens, labels).sum(-1) - reference
            chosen, rejected = ratios.chunk(2)
            return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
        if self.method == "grpo":
            chosen = self._log_probs(tokens, labels)[:, 47:]
            signs = 1.0 - 2.0 * (torch.arange(len(tokens), device=self.device) % 2)
            ratio = (chosen + 1.0).exp()
            clipped = ratio.clamp(0.8, 1.2)
            return -torch.minimum(ratio * signs[:, None], clipped * signs[:, None]).mean()
        return self.model(input_ids=tokens, labels=labels, use_cache=False).loss

    def compile(self) -> None:
        """Compile the model."""
        self.model = torch.compile(self.model)


# Counting
# --------


@dataclasses.dataclass
class Counts:
    """Counts of one step.

    Attributes:
        layers: number of layers.
        layer_forward: launches in the forward pass of the layers.
        layer_backward: launches between the gradients of their output and of their input.
        forward: launches from the host's batch to the loss.
        backward: launches in the backward pass.
        waits: host waits of forward and backward pass, by place.
        copies: copies from the host.
        peak: maximum of allocated memory above the weights, in MiB.
        operators: launches by part and operator.
    """

    layers: int = 0
    layer_forward: int = 0
    layer_backward: int = 0
    forward: int = 0
    backward: int = 0
    waits: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: int = 0
    peak: float = 0.0
    operators: dict[str, int] = dataclasses.field(default_factory=dict)


@contextmanager
def marked_layers(layers: Sequence[nn.Module], operators: Operators) -> Iterator[None]:
    """Count operators of the layers' forward and backward passes apart from those before and after them."""
    outside = {"layer_forward": "forward", "layer_backward": "backward"}

    def enter(*_: Any) -> None:
        operators.part = "layer_forward" if operators.part == "forward" else operators.part

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        operators.part = outside.get(operators.part, operators.part)
        if module is layers[-1]:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(begin_backward)

    def begin_backward(_: Tensor) -> None:
        operators.part = "layer_backward" if operators.part == "backward" else operators.part

    def end_backward(_: Tensor) -> None:
        operators.part = "backward"

    def watch_input(module: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> None:
        hidden = inputs[0] if inputs else keywords["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(end_backward)

    with ExitStack() as stack:
        stack.callback(layers[0].register_forward_pre_hook(watch_input, with_kwargs=True).remove)
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(enter).remove)
            stack.callback(layer.register_forward_hook(leave).remove)
        yield


def count_step(side: OurSide | TransformersSide) -> Counts:
    """Count a step after one that is not counted, in which caches fill and optimizer states are made."""

    def step(batch: Any, operators: Operators) -> None:
        operators.part = "forward"
        loss = side.loss(batch)
        operators.part = "backward"
        loss.backward()

    batch = side.batch(0)
    step(batch, Operators())
    side.model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    batch = side.batch(1)
    operators = Operators()
    with watched_waits() as waits, marked_layers(side.layers, operators), operators:
        step(batch, operators)
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    side.model.zero_grad(set_to_none=True)
    counts = operators.counts
    return Counts(
        layers=len(side.layers),
        layer_forward=counts["layer_forward"],
        layer_backward=counts["layer_backward"],
        forward=counts["forward"] + counts["layer_forward"],
        backward=counts["backward"] + counts["layer_backward"],
        waits=dict(waits),
        copies=operators.copies.total(),
        operators=dict(operators.names.most_common()),
        peak=round(peak, 1),
    )


def count_graphs(side: OurSide) -> dict[str, int]:
    """Compile layers and loss, run packs of different documents, and count graphs, breaks and late compilations.

    A graph that is compiled after the second step is late.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with mock.patch.dict(os.environ, TORCH_COMPILE_BACKEND="aot_eager"):
        side.compile()
    early = 0
    for index in range(2, 6):
        if index == 4:
            early = counters["stats"]["unique_graphs"]
        side.loss(side.batch(index)).backward()
        side.model.zero_grad(set_to_none=True)
    graphs = counters["stats"]["unique_graphs"]
    breaks = counters["graph_break"]
    return {"graphs": graphs, "breaks": breaks.total(), "late": graphs - early, "reasons": dict(breaks)}


def count_row(name: str, family: Family, method: str, compiled: bool) -> dict[str, Any]:
    """Count one family and method on both sides; an error becomes part of the result."""
    device = torch.device("cuda")
    row: dict[str, Any] = {
        "family": name,
        "method": method,
        "depth": family.depth,
        "torch": torch.__version__.partition("+")[0],
    }
    row["transformers_version"] = importlib.metadata.version("transformers")
    sides = {"ours": OurSide}
    if method != "qlora":  # needs bitsandbytes
        sides["transformers"] = TransformersSide
    for label, kind in sides.items():
        try:
            torch.manual_seed(0)
            side = kind(family.description, family.spec, method, device)
            row[label] = dataclasses.asdict(count_step(side))
            if compiled and label == "ours":
                row["compiled"] = count_graphs(side)
        except Exception as error:  # noqa: BLE001 - a row that fails is reported, and the others are counted
            traceback.print_exc()
            row[f"{label}_error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        side = None
        gc.collect()
        torch.cuda.empty_cache()
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Make the table of the documentation."""
    columns = ["model", "training", "forward, a layer", "backward, a layer", "micro-batch", "share", "host waits"]
    columns += ["copies", "graphs", "breaks", "late", "peak MiB"]
    lines = [".. list-table::", "   :header-rows: 1", "   :class: counts", ""]

    def add_line(cells: Sequence[str]) -> None:
        for number, cell in enumerate(cells):
            lines.append(f"   {'*' if number == 0 else ' '} - {cell}")

    add_line(columns)
    for row in rows:
        if "ours" not in row:
            continue
        ours, other = row["ours"], row.get("transformers")
        cells = [row["family"], row["method"]]
        for part in ("layer_forward", "layer_backward"):
            cells.append(_beside(ours, other, lambda counts, part=part: f"{counts[part] / counts['layers']:.0f}"))
        depth = row["depth"]
        cells.append(_beside(ours, other, lambda counts, depth=depth: f"{_launches(counts, depth):,}"))
        cells.append("—" if other is None else f"{_launches(ours, depth) / _launches(other, depth):.2f}")
        cells.append(_beside(ours, other, lambda counts: str(sum(counts["waits"].values()))))
        cells.append(_beside(ours, other, lambda counts: str(counts["copies"])))
        compiled = row.get("compiled")
        cells += ["—"] * 3 if compiled is None else [str(compiled[name]) for name in ("graphs", "breaks", "late")]
        cells.append(_beside(ours, other, lambda counts: f"{counts['peak']:,.0f}"))
        add_line(cells)
    return "\n".join(lines) + "\n"


def _launches(counts: Mapping[str, Any], depth: int) -> int:
    """Launches of a micro-batch of the whole model, with as many layers as it has."""
    of_layers = counts["layer_forward"] + counts["layer_backward"]
    others = counts["forward"] + counts["backward"] - of_layers
    return others + round(of_layers / counts["layers"] * depth)


def _beside(ours: Mapping[str, Any], other: Mapping[str, Any] | None, show: Callable[[Mapping[str, Any]], str]) -> str:
    return f"{show(ours)} / {'—' if other is None else show(other)}"


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Make the file of the documentation: what was counted, with which releases, and the table."""
    versions = sorted({f"PyTorch {row['torch']}, transformers {row['transformers_version']}" for row in rows})
    return (
        f"Counted with {' and '.join(versions)}, without a card's clock. Left of the slash is this library, right of "
        "it transformers with peft.\n\n" + table(rows)
    )


def main() -> None:
    """Count the rows that the command line asks for, or write the table of counted rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--methods", nargs="*", choices=METHODS, help="default: full and lora, for some families all")
    parser.add_argument("--compile", action="store_true", help="count graphs, breaks and late compilations, too")
    parser.add_argument("--table", type=Path, help="write the documentation's table of the rows in this file")
    arguments = parser.parse_args()
    if arguments.table:
        TABLE.write_text(page([json.loads(line) for line in arguments.table.read_text().splitlines()]))
        return
    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device: counts need one.")
    for name, family in families().items():
        if arguments.families and name not in arguments.families:
            continue
        methods = arguments.methods or (METHODS if name in FAMILIES_OF_ALL_METHODS else METHODS[:2])
        for method in methods:
            print(json.dumps(count_row(name, family, method, arguments.compile)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
