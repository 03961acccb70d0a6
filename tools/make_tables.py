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
    """Write or check; returns the number of files that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the file is not current")
    parser.add_argument("--simulate", action="store_true", help="simulate configs that changed")
    parser.add_argument("--anew", action="store_true", help="simulate all configs")
    args = parser.parse_args()
    check = args.check
    if args.simulate or args.anew:
        memory_table.update(anew=args.anew)
    texts = {
        "memory_per_gpu.rst": memory_table.table(),
        "compositions.rst": composition_table.table(),
        "gpu.rst": gpu_table.page(),
    }
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
