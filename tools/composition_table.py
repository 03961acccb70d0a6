"""What composes with what: the dimensions of a run, and the combinations that are refused, with the reason.

``tests/torchtune/training/matrix`` trains every pair of values that is not refused here and sees every refusal; the
table of the docs is made of the same lines by ``make_tables.py``.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        """Return whether it refuses a cell; a part of a cell suffices."""
        return all(cell.get(name) in values for name, values in self.when.items())

    def cells(self) -> Iterator[Cell]:
        """Yield the smallest cells that it refuses."""
        for values in itertools.product(*self.when.values()):
            yield dict(zip(self.when, values, strict=True))


_ADAPTERS = ("lora", "dora", "pissa")
_QUANTIZED = ("nf4", "int8", "float8")
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
    """Return why a cell is refused; an empty list if it trains."""
    return [refusal for refusal in REFUSALS if refusal.holds(cell)]


def all_pairs(seldom: Cell, alone: Mapping[str, tuple[str, ...]]) -> list[Cell]:
    """Return few cells that are not refused, with every pair of values that a cell can have.

    Args:
        seldom: values that take long to train with, by dimension: few cells have them.
        alone: dimension -> values that take longer still beside one of ``seldom``: no two of them in such a cell.
    """
    seldom_pairs = []
    usual_pairs = []
    for first, second in itertools.combinations(DIMENSIONS, 2):
        for value, other_value in itertools.product(DIMENSIONS[first], DIMENSIONS[second]):
            pair = {first: value, second: other_value}
            if pair.items() & seldom.items():
                seldom_pairs.append(pair)
            else:
                usual_pairs.append(pair)
    return _cover(usual_pairs, excluded=seldom, alone={}) + _cover(seldom_pairs, excluded={}, alone=alone)


def _cover(pairs: list[Cell], excluded: Cell, alone: Mapping[str, tuple[str, ...]]) -> list[Cell]:
    """Return cells that have all pairs of values, except for pairs that every cell with them refuses."""
    missing = {frozenset(pair.items()) for pair in pairs}
    cells = []
    for pair in pairs:
        if frozenset(pair.items()) not in missing:
            continue
        cell = _complete(pair, missing, excluded, alone)
        if cell is not None:
            cells.append(cell)
            missing -= _pairs(cell)
    return cells


def _pairs(cell: Cell) -> set[frozenset[tuple[str, str]]]:
    """Return all pairs of values of a cell."""
    return {frozenset(pair) for pair in itertools.combinations(cell.items(), 2)}


def _complete(
    cell: Cell,
    missing: set[frozenset[tuple[str, str]]],
    excluded: Cell,
    alone: Mapping[str, tuple[str, ...]],
) -> Cell | None:
    """Add the other dimensions to a cell; return None if all cells with its values are refused.

    The choice is greedy: in each dimension, the value with the most missing pairs is tried first.

    Args:
        cell: values that are decided.
        missing: pairs that no cell has so far.
        excluded: values that the cell must not have, by dimension.
        alone: dimension -> values of which the cell may have only one.
    """
    num_alone = sum(cell.get(name) in values for name, values in alone.items())
    if refusals(cell) or num_alone > 1:
        return None
    open_names = [name for name in DIMENSIONS if name not in cell]
    if not open_names:
        return {name: cell[name] for name in DIMENSIONS}
    name = open_names[0]
    choices = []
    for value in DIMENSIONS[name]:
        if excluded.get(name) != value:
            larger_cell = {**cell, name: value}
            choices.append((len(_pairs(larger_cell) & missing), larger_cell))
    choices.sort(key=lambda choice: -choice[0])  # of equally many, the first value
    for _, larger_cell in choices:
        completed = _complete(larger_cell, missing, excluded, alone)
        if completed is not None:
            return completed
    return None


def refused_cells() -> Iterator[tuple[Cell, Refusal]]:
    """Yield every refusal by itself: with values that it refuses, and others as close to the defaults as possible."""
    for refusal in REFUSALS:
        for refused in refusal.cells():
            open_names = [name for name in DIMENSIONS if name not in refused]
            for values in _by_distance(open_names):
                cell = {**refused, **dict(zip(open_names, values, strict=True))}
                if refusals(cell)[:1] == [refusal]:  # otherwise a run would give another reason
                    yield cell, refusal
                    break
            else:
                raise ValueError(f"{refused} is always refused for another reason than: {refusal.reason}")


def _by_distance(names: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the values of some dimensions, at first the defaults, then those with one or two others."""
    for num_changed in range(3):
        for changed in itertools.combinations(names, num_changed):
            choices = []
            for name in names:
                default, *alternatives = DIMENSIONS[name]
                choices.append(alternatives if name in changed else [default])
            yield from itertools.product(*choices)


# Dimensions that change how a run computes, not what.
HOW = ("checkpointing", "offload", "compile", "mesh", "in_backward")


def plain(cell: Cell) -> Cell:
    """Return the cell that computes the same in the plainest way: on one device, with everything kept."""
    defaults = {name: DIMENSIONS[name][0] for name in HOW}
    return {**cell, **defaults}


def shown(value: str) -> str:
    """Return a value as the docs call it."""
    return SHOWN.get(value, f"``{value}``")


def list_table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in reStructuredText; the first row is its header."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for first, *texts in rows:
        lines.append(f"   * - {first}".rstrip())
        lines += [f"     - {text}".rstrip() for text in texts]
    return lines


def table() -> str:
    """Return the tables as reStructuredText: what is trained in all pairs, and what is refused."""
    dimensions = [["dimension", "values"]]
    for name, values in DIMENSIONS.items():
        dimensions.append([SHOWN[name], ", ".join(map(shown, values))])
    refused = [["this", "with this", "because"]]
    for refusal in REFUSALS:
        conditions = []
        for name, values in refusal.when.items():
            conditions.append(f"{SHOWN[name]}: {', '.join(map(shown, values))}")
        companions = "; ".join(conditions[1:]) or "a CPU"  # on which the tests run
        refused.append([conditions[0], companions, refusal.reason])
    lines = [*list_table(dimensions), "", "Refused are:", "", *list_table(refused)]
    return "\n".join(lines) + "\n"
