"""Short runs of a recipe on 2 and 4 processes: counts collectives and their bytes, and writes them down."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.recipes.runs import after_each_step, class_of, load_recipe
from torchtune.config import load_and_check

NAME = "full_finetune_distributed"
_steps: list[dict[str, Any]] = []
_calls: Counter[str] = Counter()
_bytes: Counter[str] = Counter()


class Collectives(TorchDispatchMode):
    """Counts the collectives of a block, by kind, type and number of ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            (group,) = [dist.ProcessGroup.unbox(arg) for arg in args if is_process_group(arg)]
            everyone = "all" if group.size() == dist.get_world_size() else group.size()
            kind = f"{name} {tensors[0].dtype} {everyone}"
            _calls[kind] += 1
            _bytes[kind] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return func(*args, **(kwargs or {}))


def is_process_group(value: Any) -> bool:
    """Whether an argument of a collective is the group."""
    return isinstance(value, torch.ScriptObject) and str(value._type()).endswith("ProcessGroup")


def step_done() -> None:
    """What the recipe calls after each step."""
    _steps.append({"calls": dict(_calls), "bytes": dict(_bytes)})
    _calls.clear()
    _bytes.clear()


def main(folder: Path) -> None:
    """One process of one run."""
    torch.set_num_threads(1)
    size = os.environ["WORLD_SIZE"]
    rank_folder = folder / f"{size}_{os.environ['RANK']}"
    rank_folder.mkdir()
    module = load_recipe(NAME, rank_folder, after_each_step(f"from {__name__} import step_done; step_done()"))
    cfg = load_and_check(next(folder.glob("*.yaml")), [f"output_dir={folder}/output_{size}"], module.recipe_main)
    with Collectives():
        recipe = class_of(module)(cfg)
        recipe.setup(cfg)
        step_done()
        _steps.clear()
        recipe.train()
    (rank_folder / "counted.json").write_text(json.dumps({"steps": _steps}))
