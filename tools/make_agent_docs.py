"""Write AGENTS.md and docs/llms.txt from their templates, the command line, the recipes and the pages (`make configs`).

``tests/test_repository.py`` compares the files with ``texts``.
"""

import json
import re
import string
from pathlib import Path
from typing import Any

from torchtune._cli.tune import SUBCOMMANDS
from torchtune._recipe_registry import get_all_recipes, resolve_recipe
from torchtune.config import json_schema

ROOT = Path(__file__).parents[1]
TEMPLATES = Path(__file__).parent / "agent_docs"
# The recipe whose settings AGENTS.md lists.
RECIPE = "lora_finetune_single_device"


def command_lines() -> str:
    """Return a line for each subcommand of ``tune``."""
    lines = []
    for subcommand in SUBCOMMANDS:
        usage = subcommand.usage or f"tune {subcommand.name}"
        words = usage.split(" [")[0].split(" <")[0]
        lines.append(f"- `{words}`: {subcommand.help}")
    return "\n".join(lines)


def recipe_lines() -> str:
    """Return a line for each recipe, with its first sentence."""
    lines = []
    for recipe in get_all_recipes():
        sentence = recipe.sentence.replace("``", "`")
        lines.append(f"- `{recipe.name}`: {sentence}")
    return "\n".join(lines)


def schema_of(recipe: str) -> dict[str, Any]:
    """Return the JSON schema of a recipe's config."""
    return json_schema(resolve_recipe(recipe).load_main())


def setting_line(name: str, setting: dict[str, Any], facts: str) -> str:
    """Return a line of a list of settings."""
    return f"- `{name}` ({facts}): {setting.get('description', '')}".rstrip(": ")


def default_of(name: str, schema: dict[str, Any]) -> str:
    """Return ``required``, or the default of a setting."""
    if name in schema.get("required", []):
        return "required"
    value = json.dumps(schema["properties"][name].get("default")).strip('"')
    return f"default {value}"


def setting_lines() -> str:
    """Return a line for each setting of ``RECIPE``."""
    schema = schema_of(RECIPE)
    lines = []
    for name, setting in schema["properties"].items():
        lines.append(setting_line(name, setting, default_of(name, schema)))
    return "\n".join(lines)


def other_setting_lines() -> str:
    """Return a line for each setting that other recipes have besides, with the recipes that have it."""
    listed = schema_of(RECIPE)["properties"].keys()
    settings: dict[str, tuple[dict[str, Any], str]] = {}
    recipes: dict[str, list[str]] = {}
    for recipe in get_all_recipes():
        schema = schema_of(recipe.name)
        for name, setting in schema["properties"].items():
            if name not in listed:
                settings.setdefault(name, (setting, default_of(name, schema)))
                recipes.setdefault(name, []).append(recipe.name)
    lines = []
    for name, (setting, default) in settings.items():
        owners = ", ".join(recipes[name])
        # The two distributed recipes have the same settings besides, and are named once.
        owners = owners.replace("full_finetune_distributed", "distributed").replace(", lora_finetune_distributed", "")
        owners = owners.replace("knowledge_distillation", "distillation")
        lines.append(setting_line(name, setting, f"{owners}; {default}"))
    return "\n".join(lines)


def page_lines() -> str:
    """Return a line for each page of the documentation: a link from the root of the site, and the first sentence."""
    lines = []
    for path in sorted((ROOT / "docs").glob("*.rst")):
        title, _, *body = path.read_text(encoding="utf-8").splitlines()
        line = f"- [{title}]({path.stem}.html)"
        sentence = _first_sentence(body)
        if sentence:
            line += f": {sentence}"
        lines.append(line)
    return "\n".join(lines)


def _first_sentence(lines: list[str]) -> str:
    """Return the first sentence below a page's title, as plain text; empty if the page begins with a section."""
    paragraph = "\n".join(lines).strip("\n").split("\n\n")[0]
    if paragraph.startswith("..") or re.search(r"\n-{3,}", paragraph):
        return ""
    text = " ".join(paragraph.split())
    text = re.sub(r":\w+:`([^`<]*?)(?: <[^`]*>)?`", r"\1", text)  # :doc:`title <page>` -> title
    text = text.replace("``", "`")
    return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].rstrip(":")


def texts() -> dict[Path, str]:
    """Return the text of each file."""
    values = {
        "commands": command_lines(),
        "recipes": recipe_lines(),
        "settings": setting_lines(),
        "other_settings": other_setting_lines(),
        "pages": page_lines(),
    }
    files = {}
    for path in (ROOT / "AGENTS.md", ROOT / "docs" / "llms.txt"):
        template = string.Template((TEMPLATES / path.name).read_text(encoding="utf-8"))
        files[path] = template.safe_substitute(values)  # leaves the "$ " before commands as it is
    return files


if __name__ == "__main__":
    for file, content in texts().items():
        file.write_text(content, encoding="utf-8")
