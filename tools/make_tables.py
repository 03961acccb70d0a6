"""Write docs/tables: what each large config needs per GPU, from the estimates of a dry run, and what composes.

``--check`` writes nothing and fails if a file differs from what would be written.
"""

import argparse
import sys
from pathlib import Path

import composition_table
from recipe_table import recipes_in

from torchtune._cli._target import recipe_named_by
from torchtune.config import load_and_check
from torchtune.training.plan._plan import MemoryEstimate, memory_by_processes

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "recipes" / "configs"
TABLES = ROOT / "docs" / "tables"
SIZES = ("8B", "32B", "70B", "72B")
COUNTS = (1, 2, 4, 8, 16, 32)
GIB = 2**30


def cell(estimate: MemoryEstimate | None, offload: bool) -> str:
    """GiB on a GPU, and in host memory if parameters, gradients and optimizer states are kept there."""
    if estimate is None:
        return "—"
    kept = (estimate.weights + estimate.gradients + estimate.optimizer) if offload else 0
    host = f" + {kept / GIB:.0f} host" if offload else ""
    return f"{(estimate.offloaded if offload else estimate).total / GIB:.1f}{host}"


def table() -> str:
    """The table as reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", ""]
    rows = [["config", *(f"{count} GPU{'s' * (count > 1)}" for count in COUNTS)]]
    distributed = recipes_in("distributed")
    for path in sorted(path for size in SIZES for path in CONFIGS.glob(f"*/{size}_*.yaml")):
        recipe = recipe_named_by(path)
        if recipe.name not in distributed or path.stem.partition("_")[2] not in ("full", "lora"):
            continue
        settings = load_and_check(path, [], recipe.load_main())
        found = memory_by_processes(settings, COUNTS)
        name = path.relative_to(CONFIGS).with_suffix("")
        rows.append([f"``{name}``", *(cell(found.get(count), settings.fsdp_cpu_offload) for count in COUNTS)])
    for row in rows:
        lines += [f"   {'*' if i == 0 else ' '} - {text}" for i, text in enumerate(row)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check; returns the number of files that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the file is not current")
    check = parser.parse_args().check
    texts = {"memory_per_gpu.rst": table(), "compositions.rst": composition_table.table()}
    differ = {TABLES / name: text for name, text in texts.items() if not _is_current(TABLES / name, text)}
    for path, text in differ.items():
        print(f"{path.relative_to(ROOT)} {'is not current' if check else 'was written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return len(differ) if check else 0


def _is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
