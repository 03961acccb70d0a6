"""Copy the twin methods of the first training recipe into the others (`make sync`).

A method under a ``# twin`` comment is the same text in every training recipe that has it.
"""

import re
from pathlib import Path

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*finetune*.py"))
TWIN = re.compile(r"    # twin\n(?:    @[^\n]*\n)*    def (\w+)\(.*?(?=\n\n    (?:#|@|def)|\n\n\n)", re.DOTALL)


def main() -> None:
    """Rewrite every recipe whose twins differ from the first one's."""
    first, *others = RECIPES
    methods = {match[1]: match[0] for match in TWIN.finditer(first.read_text())}
    for path in others:
        text = path.read_text()
        synced = TWIN.sub(lambda match: methods.get(match[1], match[0]), text)
        if synced != text:
            path.write_text(synced)
            print(f"synced {path.name}")


if __name__ == "__main__":
    main()
