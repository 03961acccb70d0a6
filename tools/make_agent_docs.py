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


def schema_of(recipe: str) -> dict[str, Any]:
    """The JSON schema of a recipe's config."""
    return json_schema(resolve_recipe(recipe).load_main())


def setting_line(name: str, setting: dict[str, Any], facts: str) -> str:
    """One line of a list of settings."""
    return f"- `{name}` ({facts}): {setting.get('description', '')}".rstrip(": ")


def default_of(name: str, schema: dict[str, Any]) -> str:
    """``required``, or the default of a setting."""
    if name in schema.get("required", []):
        return "required"
    value = json.dumps(schema["properties"][name].get("default")).strip('"')
    return f"default {value}"


def setting_lines() -> str:
    """The settings of the recipe, one a line."""
    schema = schema_of(RECIPE)
    lines = []
    for name, setting in schema["properties"].items():
        lines.append(setting_line(name, setting, default_of(name, schema)))
    return "\n".join(lines)


def other_setting_lines() -> str:
    """Settings that other recipes have besides, one a line, with the recipes that have them."""
    known = schema_of(RECIPE)["properties"].keys()
    settings: dict[str, tuple[dict[str, Any], str]] = {}
    recipes: dict[str, list[str]] = {}
    for recipe in get_all_recipes():
        schema = schema_of(recipe.name)
        for name, setting in schema["properties"].items():
            if name not in known:
                settings.setdefault(name, (setting, default_of(name, schema)))
                recipes.setdefault(name, []).append(recipe.name)
    lines = []
    for name, (setting, default) in settings.items():
        owners = ", ".join(recipes[name]).replace("full_finetune_distributed", "distributed")
        owners = owners.replace(", lora_finetune_distributed", "").replace("knowledge_distillation", "distillation")
        lines.append(setting_line(name, setting, f"{owners}; {default}"))
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
