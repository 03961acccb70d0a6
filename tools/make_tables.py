"""Write docs/tables: what each large config needs per GPU, what composes, and what was measured on GPUs.

``--simulate`` simulates configs whose file has changed since the last time (seconds each), ``--anew`` all of them.
``tests/test_repository.py`` compares the files with ``texts``, which simulates nothing.
"""

import argparse
from pathlib import Path

import composition_table
import gpu_table
import memory_table

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "docs" / "tables"


def texts() -> dict[Path, str]:
    """Return the text of each file."""
    return {
        TABLES / "memory_per_gpu.rst": memory_table.table(),
        TABLES / "compositions.rst": composition_table.table(),
        TABLES / "gpu.rst": gpu_table.page(),
    }


def main() -> None:
    """Simulate what the command line asks for, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", action="store_true", help="simulate configs that changed")
    parser.add_argument("--anew", action="store_true", help="simulate all configs")
    args = parser.parse_args()
    if args.simulate or args.anew:
        memory_table.update(anew=args.anew)
    TABLES.mkdir(exist_ok=True)
    for path, text in texts().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
