"""Short runs of a recipe on 2, 4 and 8 processes: counts collectives, their bytes and sockets, and writes them down."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.recipes.forker import environments, fork, import_rooms
from tests.recipes.runs import after_each_step, class_of, load_recipe, write_config
from torchtune.config import load_and_check

SIZES = (2, 4, 8)
NAME = "full_finetune_distributed"
_steps: list[dict[str, Any]] = []
_calls: Counter[str] = Counter()
_bytes: Counter[str] = Counter()
_inherited = 0  # sockets that a fork begins with: the ports that the parent holds


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


def sockets() -> int:
    """Sockets that this process has opened."""
    found = -_inherited
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:  # the one of the listing
            continue
    return found


def step_done() -> None:
    """What the recipe calls after each step."""
    _steps.append({"calls": dict(_calls), "bytes": dict(_bytes), "sockets": sockets()})
    _calls.clear()
    _bytes.clear()


def torch_alone(size: int) -> int:
    """Sockets that torch opens by itself, as it does by default, for one group and one mesh."""
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, size, 1, 1), mesh_dim_names=("a", "b", "c", "d"))
    for group in (None, mesh["b"].get_group()):
        value, whole = torch.ones(1), torch.empty(size)
        dist.all_reduce(value, group=group)
        dist.all_gather(list(whole.chunk(size)), value, group=group)
    dist.barrier()
    found = sockets()
    dist.barrier()  # a rank that ended closes the sockets of those that have not counted
    return found


def rank(size: int, config: Path, module: Any, alone: bool) -> dict[str, Any]:
    """One process of one run."""
    global _inherited
    _inherited = sockets()
    if alone:
        return {"sockets": torch_alone(size)}
    cfg = load_and_check(config, [f"output_dir={config.parent / f'output_{size}'}"], module.recipe_main)
    with Collectives():
        recipe = class_of(module)(cfg)
        recipe.setup(cfg)
        step_done()
        setup = _steps.pop()
        recipe.train()
    return {"setup": setup, "steps": _steps}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    import_rooms()
    module = load_recipe(
        NAME, folder, after_each_step("from tests.torchtune.training.parallel.messages import step_done; step_done()")
    )
    config = write_config(NAME, folder, folder / "output", batch_size=1, max_steps_per_epoch=3, clip_grad_norm=1.0)
    for size in SIZES:
        for alone in (False,) if size == SIZES[0] else (True, False):
            pids = []
            for environment in environments(size):
                pid = fork()
                pids.append(pid)
                if pid == 0:
                    os.environ.update(environment)
                    found = rank(size, config, module, alone)
                    name = f"{'torch' if alone else 'ours'}_{size}_{environment['RANK']}.json"
                    (folder / name).write_text(json.dumps(found))
                    os._exit(0)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            assert codes == [0] * size, codes


if __name__ == "__main__":
    sys.modules["tests.torchtune.training.parallel.messages"] = sys.modules["__main__"]
    main(Path(sys.argv[1]))
