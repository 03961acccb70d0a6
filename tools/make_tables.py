"""Write docs/tables: what each large config needs per GPU, what composes, and what was measured on GPUs.

``--simulate`` simulates configs whose file has changed since the last time (seconds each), ``--anew`` all of them.
``--check`` writes and simulates nothing, and fails if a file differs from what would be written.
"""

import argparse
import sys
from pathlib import Path

import composition_table
import gpu_table
import memory_table

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "docs" / "tables"


def main() -> int:
    """Write or check; return the number of files that differ and were not written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the file is not current")
    parser.add_argument("--simulate", action="store_true", help="simulate configs that changed")
    parser.add_argument("--anew", action="store_true", help="simulate all configs")
    args = parser.parse_args()
    if args.simulate or args.anew:
        memory_table.update(anew=args.anew)
    texts = {
        "memory_per_gpu.rst": memory_table.table(),
        "compositions.rst": composition_table.table(),
        "gpu.rst": gpu_table.page(),
    }
    num_differing = 0
    for name, text in texts.items():
        path = TABLES / name
        if path.exists() and path.read_text() == text:
            continue
        if args.check:
            num_differing += 1
            print(f"{path.relative_to(ROOT)} is not current")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"{path.relative_to(ROOT)} was written")
    return num_differing


if __name__ == "__main__":
    sys.exit(main())
