"""What composes with what: the dimensions of a run, and the combinations that are refused, with the reason.

``tests/torchtune/training/matrix`` trains every pair of values that is not refused here and sees every refusal; the
table of the docs is made of the same lines by ``make_tables.py``.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Dimension -> its values; the first one is what a run has unless it says otherwise. A dimension is shown under its key.
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "adapter": ("none", "lora", "dora", "pissa"),
    "base": ("plain", "nf4", "int8", "float8", "fake_quant", "float8_training"),
    "dtype": ("fp32", "bf16"),
    "checkpointing": ("none", "full", "every_2nd", "op"),
    "offload": ("none", "activations", "parameters"),
    "compile": ("off", "on"),
    "mesh": ("one", "fsdp", "tp"),
    "optimizer": ("AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8", "MuonWithAdamW", "lora_plus"),
    "in_backward": ("off", "on"),
    "precision": ("stochastic_rounding", "fp32_master", "param_dtype"),
}
# Name of a dimension, or of a value, in the docs: what a config says.
SHOWN = {
    "adapter": "adapter",
    "base": "base weights",
    "dtype": "``dtype``",
    "checkpointing": "activation checkpointing",
    "offload": "offloading",
    "compile": "``compile``",
    "mesh": "devices",
    "optimizer": "``optimizer``",
    "in_backward": "``optimizer_in_bwd``",
    "precision": "``optimizer_precision``",
    "lora": "LoRA",
    "dora": "DoRA",
    "pissa": "PiSSA (``init: pissa``)",
    "nf4": "NF4",
    "fake_quant": "fake quantization (QAT)",
    "float8_training": "``Float8Training``",
    "every_2nd": "every second layer (``ac_option: 2``)",
    "op": "operators (``ac_option: op``)",
    "activations": "activations",
    "parameters": "parameters (``fsdp_cpu_offload``)",
    "one": "one",
    "fsdp": "FSDP",
    "tp": "tensor parallel",
    "lora_plus": "``GroupedOptimizer`` with ``lora_b``",
}

Cell = dict[str, str]


@dataclass(frozen=True)
class Refusal:
    """Values that do not go together.

    Attributes:
        when: dimension -> values; a cell that has one of them in every dimension is refused.
        message: what the sentence of the error contains.
        reason: for the docs.
    """

    when: dict[str, tuple[str, ...]]
    message: str
    reason: str

    def holds(self, cell: Cell) -> bool:
        """Whether it refuses a cell; a part of a cell will do."""
        return all(cell.get(name) in values for name, values in self.when.items())

    def cells(self) -> Iterator[Cell]:
        """The smallest cells that it refuses."""
        for values in itertools.product(*self.when.values()):
            yield dict(zip(self.when, values, strict=True))


_ADAPTERS, _QUANTIZED = ("lora", "dora", "pissa"), ("nf4", "int8", "float8")
REFUSALS = (
    Refusal(
        {"adapter": ("none",), "base": _QUANTIZED},
        "its base is quantized, so it is frozen and only an adapter can be trained",
        "a quantized base is frozen: without an adapter nothing is trained",
    ),
    Refusal(
        {"adapter": _ADAPTERS, "base": ("float8_training",)},
        "products in float8 are for weights that are trained",
        "products in float8 are for weights that are trained",
    ),
    Refusal(
        {"adapter": ("dora",), "base": ("fake_quant",)},
        "which has no fake quantization: set use_dora to False",
        "the length of a row of rounded weights is not what DoRA trains",
    ),
    Refusal(
        {"base": ("fake_quant",), "mesh": ("tp",)},
        "fake quantization needs whole layers: set tensor_parallel_dim to 1",
        "an input that is split has no range of its own for each token",
    ),
    Refusal(
        {"base": ("float8_training",), "mesh": ("tp",)},
        "layers in float8 cannot be split: set tensor_parallel_dim=1",
        "the scale of a part of a tensor is not that of the tensor",
    ),
    Refusal(
        {"adapter": ("none",), "optimizer": ("lora_plus",)},
        "the pattern 'lora_b' matches no trained parameter",
        "there is no ``lora_b``",
    ),
    Refusal(
        {"offload": ("activations",), "checkpointing": ("none",)},
        "needs enable_activation_checkpointing=True, or ac_mode",
        "what a layer keeps inside is too much to copy: activations between checkpointed layers are",
    ),
    Refusal(
        {"offload": ("activations",)},
        "needs device=cuda, not cpu",
        "on a CPU activations are in host memory already",
    ),
    Refusal(
        {"offload": ("parameters",), "mesh": ("one",)},
        "fsdp_cpu_offload: it needs torchrun",
        "FSDP moves them: start one process with ``tune run --nproc-per-node 1``",
    ),
    Refusal(
        {"optimizer": ("AdamW8bit", "AdamW4bit", "AdamWFp8"), "precision": ("param_dtype",), "dtype": ("bf16",)},
        "takes its steps in float32: use stochastic_rounding or fp32_master",
        "states of few bits are stepped in float32",
    ),
)


def refusals(cell: Cell) -> list[Refusal]:
    """Why a cell is refused; nothing if it trains."""
    return [refusal for refusal in REFUSALS if refusal.holds(cell)]


def all_pairs(seldom: Cell, alone: Mapping[str, tuple[str, ...]]) -> list[Cell]:
    """Cells that are not refused, few of them, with every pair of values that a cell can have.

    Args:
        seldom: values that are dear, a dimension each: few cells have them.
        alone: dimension -> values that are dearer still beside one of ``seldom``: no two of them in such a cell.
    """
    names = list(DIMENSIONS)
    wanted = [
        {first: a, second: b}
        for first, second in itertools.combinations(names, 2)
        for a, b in itertools.product(DIMENSIONS[first], DIMENSIONS[second])
    ]
    dear = [pair for pair in wanted if pair.items() & seldom.items()]
    cells: list[Cell] = []
    for queue in ([pair for pair in wanted if pair not in dear], dear):
        missing = {frozenset(pair.items()) for pair in queue}
        for pair in queue:
            if frozenset(pair.items()) in missing and (
                cell := _completed(pair, missing, {} if queue is dear else seldom, alone if queue is dear else {})
            ):
                cells.append(cell)
                missing -= _pairs(cell)
    return cells


def _pairs(cell: Cell) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(cell.items(), 2)}


def _completed(
    cell: Cell, missing: set[frozenset[tuple[str, str]]], without: Cell, alone: Mapping[str, tuple[str, ...]]
) -> Cell | None:
    """A cell with the given values that has as many of the missing pairs as a greedy choice finds; None if refused."""
    if refusals(cell) or sum(cell.get(name) in values for name, values in alone.items()) > 1:
        return None
    open_names = [name for name in DIMENSIONS if name not in cell]
    if not open_names:
        return {name: cell[name] for name in DIMENSIONS}
    choices = []
    for value in DIMENSIONS[open_names[0]]:
        if without.get(open_names[0]) != value:
            longer = cell | {open_names[0]: value}
            choices.append((len(_pairs(longer) & missing), longer))
    for _, longer in sorted(choices, key=lambda choice: -choice[0]):
        if found := _completed(longer, missing, without, alone):
            return found
    return None


def refused_cells() -> Iterator[tuple[Cell, Refusal]]:
    """Every refusal by itself: values that it refuses, and everything else as it is by default or has to be."""
    for refusal in REFUSALS:
        for cell in refusal.cells():
            others = [name for name in DIMENSIONS if name not in cell]
            choices = (cell | dict(zip(others, rest, strict=True)) for rest in _by_distance(others))
            yield next(whole for whole in choices if refusals(whole)[:1] == [refusal]), refusal


def _by_distance(names: list[str]) -> Iterator[tuple[str, ...]]:
    """All values of some dimensions, those with the fewest that are not the default first."""
    for count in range(3):
        for changed in itertools.combinations(names, count):
            yield from itertools.product(*(DIMENSIONS[n][1:] if n in changed else DIMENSIONS[n][:1] for n in names))


# Dimensions that change how a run computes, not what.
HOW = ("checkpointing", "offload", "compile", "mesh", "in_backward")


def plain(cell: Cell) -> Cell:
    """The cell that computes the same in the plainest way: on one device, with everything kept."""
    return cell | {name: DIMENSIONS[name][0] for name in HOW}


def shown(value: str) -> str:
    """A value as the docs call it."""
    return SHOWN.get(value, f"``{value}``")


def table() -> str:
    """The tables as reStructuredText: what is trained in all pairs, and what is refused."""
    lines = [".. list-table::", "   :header-rows: 1", "", "   * - dimension", "     - values"]
    for name, values in DIMENSIONS.items():
        lines += [f"   * - {SHOWN[name]}", f"     - {', '.join(shown(value) for value in values)}"]
    lines += ["", "Refused are:", "", ".. list-table::", "   :header-rows: 1", ""]
    lines += ["   * - this", "     - with this", "     - because"]
    for refusal in REFUSALS:
        first, *rest = (f"{SHOWN[n]}: {', '.join(shown(v) for v in values)}" for n, values in refusal.when.items())
        lines += [f"   * - {first}", f"     - {'; '.join(rest) or 'a CPU'}", f"     - {refusal.reason}"]
    return "\n".join(lines) + "\n"
