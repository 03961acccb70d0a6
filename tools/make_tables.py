"""Write the table of what each large config needs per GPU into docs/tables, from the estimates of a dry run.

``--check`` writes nothing and fails if the file differs from what would be written.
"""

import argparse
import sys
from pathlib import Path

from recipe_table import recipes_in

from torchtune._cli._target import recipe_named_by
from torchtune.config import load_and_check
from torchtune.training.plan._plan import MemoryEstimate, memory_by_processes

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "recipes" / "configs"
TABLE = ROOT / "docs" / "tables" / "memory_per_gpu.rst"
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
    text = table()
    if TABLE.exists() and TABLE.read_text() == text:
        return 0
    print(f"{TABLE.relative_to(ROOT)} {'is not current' if check else 'was written'}")
    if not check:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(text)
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
