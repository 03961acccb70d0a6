"""``tune data``."""

import argparse
from pathlib import Path
from typing import Any

from torchtune._cli.subcommand import Subcommand, check_least
from torchtune.utils import UserError

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")


class DataShow(Subcommand):
    """Subcommand that inspects datasets."""

    name = "data show"
    help = "Show format, trained tokens, lengths, duplicates and steps"
    description = (
        "Show the rows of a file, or of the datasets of a config: format, counts, lengths,\n"
        "duplicates, rows in both training and validation data, and examples with their trained tokens."
    )
    epilog = """
        examples:
          $ tune data show chats.jsonl
          $ tune data show chats.jsonl --validation held_out.jsonl
          $ tune data show chats.jsonl --tokenizer /tmp/SmolLM2-135M-Instruct
          $ tune data show smol/135M_lora_single_device dataset.data_files=chats.jsonl
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("source", help="a file of rows, the name of a config, or the path of a YAML file")
        settings = "key=value: settings of the config to change, or settings of the dataset of a file"
        add("overrides", nargs="*", default=[], help=settings)
        add("--tokenizer", help="checkpoint with the tokenizer of a file; a config names its own")
        add("--validation", type=Path, help="file of validation data, to find rows that are in both files")
        add("--max-seq-len", type=int, default=2048, help="maximum tokens per row or pack of a file (default: 2048)")
        add("--examples", type=int, default=2, help="number of rows to print (default: 2)")
        add("--all", action="store_true", help="read every row instead of the first 2,000")

    def _run(self, args: argparse.Namespace) -> None:
        check_least(args, examples=0, max_seq_len=1)
        path = Path(args.source).expanduser()
        if path.name.lower().removesuffix(".gz").endswith(_SUFFIXES):
            self._show_file(path, args)
            return
        for name in ("tokenizer", "validation"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name} is an option for files: set it in the config instead.")
        from torchtune._cli._data_show import show_config
        from torchtune.datasets import SAMPLE

        show_config(_read_settings(args.source, args.overrides), args.examples, args.all, SAMPLE)

    def _show_file(self, path: Path, args: argparse.Namespace) -> None:
        from torchtune.datasets import SAMPLE, report, scan, shared_rows

        for file in filter(None, (path, args.validation)):
            if not file.is_file():
                raise UserError(f"there is no file {file}: correct the path.")
        if args.overrides and args.tokenizer is None:
            raise UserError(f"'{args.overrides[0]}' is a setting of a dataset: add --tokenizer to build the dataset.")
        facts = scan(path, everything=args.all)
        print("\n".join(report(facts)))
        if args.validation is not None:
            held_out = scan(args.validation, everything=args.all)
            print("\n".join([*report(held_out), shared_rows(facts, held_out)]))
        if args.tokenizer is None:
            print("Add --tokenizer <checkpoint> to see tokens, trained tokens and packs.")
            return
        from torchtune._cli._data_show import show_dataset
        from torchtune.models import image_text_transform
        from torchtune.tokenizers import hf_tokenizer

        node = dataset_node(
            path, facts.formats.most_common(1)[0][0] if facts.formats else ("unknown", ""), args.overrides
        )
        load = image_text_transform if ".multimodal." in node["_component_"] else hf_tokenizer
        tokenizer = load(args.tokenizer, max_seq_len=args.max_seq_len)
        show_dataset("dataset", node, tokenizer, args.examples, args.all, SAMPLE)


class DataPrepare(Subcommand):
    """Subcommand that tokenizes datasets."""

    name = "data prepare"
    help = "Tokenize the data of a config once, for any number of runs and processes"
    description = (
        "Tokenize the datasets of a config into a folder of memory-mapped files. A run with\n"
        "dataset.prepared=<folder> reads them without tokenizing. It stops with an error if the tokenizer, the\n"
        "template, the masks, the data or the code have changed."
    )
    epilog = """
        examples:
          $ tune data prepare my_config.yaml --output /data/prepared
          $ tune run --config my_config.yaml dataset.prepared=/data/prepared
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("config", help="name of a config, or path of a YAML file")
        add("overrides", nargs="*", default=[], help="key=value: settings of the config to change")
        add("--output", type=Path, required=True, help="folder for the tokenized data")
        add("--workers", type=int, help="number of tokenizing processes (default: one per core)")

    def _run(self, args: argparse.Namespace) -> None:
        check_least(args, workers=1)
        from torchtune._cli._data_prepare import prepare_config

        prepare_config(_read_settings(args.config, args.overrides), args.output.expanduser(), args.workers)


class Data(Subcommand):
    """Subcommand that inspects and tokenizes datasets."""

    name = "data"
    help = description = "Inspect data before a run, and tokenize them once for many runs"

    def _add_arguments(self) -> None:
        subparsers = self._parser.add_subparsers(title="subcommands")
        DataShow(subparsers)
        DataPrepare(subparsers)


def dataset_node(path: Path, found: tuple[str, str], overrides: list[str]) -> dict[str, Any]:
    """Return a dataset node that reads the file, for the format (name, builder and its settings) found in it."""
    from torchtune.config import Document, apply_overrides

    reader = found[1]
    if not reader:
        raise UserError(f"{path}: no dataset reads rows of these columns: use a config with a column_map.")
    name, *settings = reader.split()
    document = Document({"_component_": f"torchtune.datasets.{name}", "source": str(path)})
    apply_overrides(document, [setting.removeprefix("dataset.") for setting in [*settings, *overrides]])
    document.check()
    return document.data


def _read_settings(name: str, overrides: list[str]) -> Any:
    """Return the checked settings of a config with a dataset, for the recipe named in it."""
    from torchtune._cli._target import recipe_named_by, resolve_config
    from torchtune.config import load_and_check
    from torchtune.training import SettingsView

    config = resolve_config(name)
    cfg = SettingsView.of(load_and_check(config, overrides, recipe_named_by(config).load_main()))
    if cfg.dataset is None:
        raise UserError("the config has no dataset: name a config of a recipe that trains.")
    return cfg
