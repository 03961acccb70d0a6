"""``tune cat``."""

import argparse
from pathlib import Path

from torchtune._cli._find_recipe import suggest_configs
from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import find_config, find_recipe


class Cat(Subcommand):
    """Subcommand that prints a config."""

    name = "cat"
    help = "Print a config"
    description = "Print a config, as it is or with its keys sorted."
    epilog = """
        examples:
          $ tune cat llama3_2/1B_lora_single_device
          recipe: lora_finetune_single_device
          output_dir: /tmp/torchtune/llama3_2_1B/lora_single_device
          ...
          $ tune cat --sort my_config.yaml
        To see all configs, run `tune ls`; to change one, copy it with `tune cp`.
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("config_name", help="name of a config, or path of a YAML file")
        self._parser.add_argument("--sort", action="store_true", help="print the keys in alphabetical order")

    def _run(self, args: argparse.Namespace) -> None:
        import yaml

        from torchtune.config import ConfigError, read_document

        name = args.config_name
        path = find_config(name)
        if path is None:
            if find_recipe(name) is not None:
                print(f"'{name}' is a recipe, not a config. Please use a config name.")
                return
            path = Path(name)
            if path.suffix.lower() not in (".yaml", ".yml"):
                self._parser.error(
                    f"Invalid config format: '{name}'. Must be YAML (.yaml/.yml), or a name of `tune ls`: "
                    + (suggest_configs(name) or "`tune ls --all` shows all.")
                )
            if not path.is_file():
                self._parser.error(f"Config '{name}' not found.")
        try:
            document = read_document(path)
            if args.sort:
                document.check()
        except ConfigError as error:
            self._parser.error(f"Error parsing YAML file: {error.errors[0]}")
        text = path.read_text(encoding="utf-8-sig")
        if args.sort and document.data:
            text = yaml.safe_dump(document.data, sort_keys=True, allow_unicode=True, indent=4, width=80)
        if document.data or document.mistakes:
            print(text, end="" if text.endswith("\n") else "\n")
