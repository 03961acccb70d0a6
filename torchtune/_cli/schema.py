"""``tune schema``."""

import argparse
import json
from typing import Any

from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import get_all_recipes, resolve_recipe


class Schema(Subcommand):
    """Subcommand that prints the JSON schema of a recipe's config, or of all recipes' configs."""

    name = "schema"
    help = "Print the JSON schema of a recipe's config, for editors and agents"
    description = (
        "Print the JSON schema (draft 2020-12) of a recipe's config: every key with its type, bounds,\n"
        "default and comment. Without a recipe, the schema of every shipped recipe, chosen by the\n"
        "config's key `recipe`. Components are checked by `tune validate`, which reads their signatures."
    )
    epilog = """
        examples:
          $ tune schema lora_finetune_single_device > lora.schema.json
          $ tune schema > torchtune.schema.json
        An editor with a YAML language server checks a config that begins with
          # yaml-language-server: $schema=torchtune.schema.json
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("recipe", nargs="?", help="name of a recipe, or path of its file")

    def _run(self, args: argparse.Namespace) -> None:
        from torchtune.config import json_schema

        if args.recipe is None:
            schema = _schema_of_all_recipes()
        else:
            schema = json_schema(resolve_recipe(args.recipe).load_main())
        print(json.dumps(schema, indent=2))


def _schema_of_all_recipes() -> dict[str, Any]:
    """Return a schema in which the key ``recipe`` of a config chooses the schema of its settings."""
    from torchtune.config import json_schema

    definitions = {}
    choices = []
    names = []
    for recipe in get_all_recipes():
        schema = json_schema(resolve_recipe(recipe.name).load_main())
        dialect = schema.pop("$schema")
        definitions[recipe.name] = schema
        recipe_names = [recipe.name, *recipe.former_names]
        names += recipe_names
        has_this_recipe = {"properties": {"recipe": {"enum": recipe_names}}, "required": ["recipe"]}
        pointer = recipe.name.replace("~", "~0").replace("/", "~1")  # in a JSON pointer (RFC 6901)
        choices.append({"if": has_this_recipe, "then": {"$ref": f"#/$defs/{pointer}"}})
    return {
        "$schema": dialect,
        "type": "object",
        "properties": {"recipe": {"enum": names, "description": "Name of the recipe that the config is for."}},
        "required": ["recipe"],
        "allOf": choices,
        "$defs": definitions,
    }
