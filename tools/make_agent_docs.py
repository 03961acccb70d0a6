"""Write AGENTS.md and docs/llms.txt from their templates, the command line, the recipes and the pages (`make configs`).

``--check`` writes nothing and fails if a file differs from what would be written.
"""

import argparse
import json
import re
import string
import sys
from pathlib import Path
from typing import Any

from torchtune._cli._find_recipe import resolve_recipe
from torchtune._cli.tune import SUBCOMMANDS
from torchtune._recipe_registry import get_all_recipes
from torchtune.config import json_schema

ROOT = Path(__file__).parents[1]
TEMPLATES = Path(__file__).parent / "agent_docs"
# The recipe whose settings AGENTS.md lists.
RECIPE = "lora_finetune_single_device"


def command_lines() -> str:
    """The subcommands of ``tune``, one a line."""
    lines = []
    for subcommand in SUBCOMMANDS:
        usage = subcommand.usage or f"tune {subcommand.name}"
        words = usage.split(" [")[0].split(" <")[0]
        lines.append(f"- `{words}`: {subcommand.help}")
    return "\n".join(lines)


def recipe_lines() -> str:
    """The recipes with their first sentence, one a line."""
    lines = []
    for recipe in get_all_recipes():
        sentence = recipe.sentence.replace("``", "`")
        lines.append(f"- `{recipe.name}`: {sentence}")
    return "\n".join(lines)


def settings_of(recipe: str) -> dict[str, dict[str, Any]]:
    """Setting -> its JSON schema."""
    return json_schema(resolve_recipe(recipe).load_main())["properties"]


def setting_lines() -> str:
    """The settings of the recipe, one a line."""
    schema = json_schema(resolve_recipe(RECIPE).load_main())
    required = set(schema.get("required", []))
    lines = []
    for name, setting in schema["properties"].items():
        value = json.dumps(setting.get("default")).strip('"')
        default = "required" if name in required else f"default {value}"
        lines.append(f"- `{name}` ({default}): {setting.get('description', '')}".rstrip(": "))
    return "\n".join(lines)


def other_setting_lines() -> str:
    """Settings that other recipes have besides, one recipe a line."""
    known = settings_of(RECIPE).keys()
    lines = []
    for recipe in get_all_recipes():
        others = [f"`{name}`" for name in settings_of(recipe.name) if name not in known]
        if others:
            lines.append(f"- `{recipe.name}`: {', '.join(others)}")
    return "\n".join(lines)


def page_lines() -> str:
    """The pages of the documentation with title and first sentence, as links from the root of the site."""
    lines = []
    for path in sorted((ROOT / "docs").glob("*.rst")):
        title, _, *body = path.read_text(encoding="utf-8").splitlines()
        sentence = _first_sentence(body)
        lines.append(f"- [{title}]({path.stem}.html)" + (f": {sentence}" if sentence else ""))
    return "\n".join(lines)


def _first_sentence(lines: list[str]) -> str:
    """The first sentence of a page below its title, as plain text; empty if the page begins with a section."""
    paragraph = "\n".join(lines).strip("\n").split("\n\n")[0]
    if paragraph.startswith("..") or re.search(r"\n-{3,}", paragraph):
        return ""
    text = " ".join(paragraph.split())
    text = re.sub(r":\w+:`([^`<]*?)(?: <[^`]*>)?`", r"\1", text).replace("``", "`")
    return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].rstrip(":")


def texts() -> dict[Path, str]:
    """The files and what they should hold."""
    values = {"commands": command_lines(), "recipes": recipe_lines()}
    agents = _filled("AGENTS.md", settings=setting_lines(), other_settings=other_setting_lines(), **values)
    return {ROOT / "AGENTS.md": agents, ROOT / "docs" / "llms.txt": _filled("llms.txt", pages=page_lines(), **values)}


def _filled(template: str, **values: str) -> str:
    # Commands begin with "$ ", which stands for itself.
    return string.Template((TEMPLATES / template).read_text(encoding="utf-8")).safe_substitute(values)


def main() -> int:
    """Write or check; returns the number of files that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is not current")
    check = parser.parse_args().check
    differing = {path: text for path, text in texts().items() if not path.exists() or path.read_text() != text}
    for path, text in differing.items():
        print(f"{path.relative_to(ROOT)} {'is not current' if check else 'was written'}")
        if not check:
            path.write_text(text)
    return len(differing) if check else 0


if __name__ == "__main__":
    sys.exit(main())
