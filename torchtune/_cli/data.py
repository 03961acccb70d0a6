"""``tune data``."""

import argparse
import shlex
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtune._cli._shorthands import changed, dataset_node, expand_shorthands
from torchtune._cli.subcommand import Subcommand, check_least
from torchtune.utils import UserError, explain_file_limits

if TYPE_CHECKING:
    from torchtune.datasets import Shard

_FROM_CONFIG = "torchtune.models.from_hf_config"
# Settings of the file, which need no tokenizer.
_FILE_SETTINGS = {
    "delimiter", "sep", "quotechar", "quoting", "escapechar", "doublequote", "skipinitialspace", "column_names",
    "names", "header", "skiprows", "encoding", "field",
}  # fmt: skip


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
          $ tune data show faq.csv --tokenizer /tmp/SmolLM2-135M-Instruct column_map.input=asked column_map.output=said
          $ tune data show smol/135M_lora_single_device dataset.data_files=chats.jsonl
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("source", help="a file or folder of rows, the name of a config, or the path of a YAML file")
        settings = (
            "key=value: settings of the config to change; for a file, settings of its dataset (_component_,\n"
            "column_map.input, packed …), of the tokenizer (tokenizer.max_seq_len …), and of the file (delimiter …)"
        )
        add("overrides", nargs="*", default=[], help=settings)
        add("--tokenizer", help="checkpoint with the tokenizer of a file; a config names its own")
        add("--validation", type=Path, help="file of validation data, to find rows that are in both files")
        add("--max-seq-len", type=int, default=2048, help="maximum tokens per row or pack of a file (default: 2048)")
        add("--examples", type=int, default=2, help="number of rows to print (default: 2)")
        add("--all", action="store_true", help="read every row instead of the first 2,000")

    def _run(self, args: argparse.Namespace) -> None:
        check_least(args, examples=0, max_seq_len=1)
        path = Path(args.source).expanduser()
        from torchtune.datasets import is_data_file

        if path.is_dir() or is_data_file(path.name) or _is_binary(path):  # such as .xlsx, which is refused as rows
            self._show_file(path, args)
            return
        for name in ("tokenizer", "validation"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name} is an option for files: set it in the config instead.")
        from torchtune._cli._data_show import show_config
        from torchtune.datasets import SAMPLE

        show_config(_read_settings(args.source, args.overrides), args.examples, args.all, SAMPLE)

    def _show_file(self, path: Path, args: argparse.Namespace) -> None:
        """Report on the rows of a file, and with a tokenizer on the dataset that reads them."""
        from torchtune.datasets import CHECKED_SETTINGS, SAMPLE, report, scan, shared_rows

        for file in (path, args.validation):
            if file is not None and not file.exists():
                raise UserError(f"there is no file {file}: correct the path.")
        overrides = _Overrides.of(args.overrides)
        if (overrides.dataset or overrides.tokenizer) and args.tokenizer is None:
            setting = [*overrides.dataset, *overrides.tokenizer][0]
            raise UserError(f"'{setting}' is a setting of a dataset: add --tokenizer to build the dataset.")
        checked = []  # settings of the dataset that decide which rows are usable
        splits = []
        for override in overrides.dataset:
            key = override.partition("=")[0]
            if key in CHECKED_SETTINGS:
                checked.append(override)
            if key == "split":
                splits.append(override)
        options = {"everything": args.all, "settings": changed({}, overrides.file), "chosen": changed({}, checked)}
        facts = scan(path, **options, **changed({}, splits))  # the split is of this file alone
        print("\n".join(report(facts)))
        if args.validation is not None:
            held_out = scan(args.validation, **options)
            print("\n".join([*report(held_out), shared_rows(facts, held_out)]))
        if not facts.formats or len(facts.problems) >= facts.rows:  # after the report, which names them
            raise UserError(f"{path}: none of its {facts.rows:,} rows can be used: correct the rows.")
        if args.tokenizer is None:
            print("Add --tokenizer <checkpoint> to see tokens, trained tokens and packs.")
            return
        from torchtune import config
        from torchtune._cli._data_show import show_dataset

        node = dataset_node(path, facts.format, [*overrides.file, *overrides.dataset], facts.defect)
        loader = "torchtune.tokenizers.hf_tokenizer"
        if ".multimodal." in node["_component_"]:
            loader = "torchtune.models.image_text_transform"
        defaults = {"_component_": loader, "path": args.tokenizer, "max_seq_len": args.max_seq_len}
        settings = {"dataset": node, "tokenizer": changed(defaults, overrides.tokenizer)}
        config.validate(settings)
        tokenizer = config.instantiate(settings["tokenizer"])
        show_dataset("dataset", node, tokenizer, args.examples, args.all, SAMPLE, _context_length(args.tokenizer))


def _is_binary(path: Path) -> bool:
    """Return whether a path is a file with zero bytes at its beginning, which no config has."""
    if not path.is_file():
        return False
    with explain_file_limits(), path.open("rb") as file:
        return b"\0" in file.read(4096)


def _context_length(checkpoint: str) -> int | None:
    """Return the tokens of the longest row that a checkpoint's model reads; None if its architecture is not known."""
    from torchtune.estimate import context_length
    from torchtune.models import ModelError

    try:
        return context_length({"model": {"_component_": _FROM_CONFIG, "checkpoint_dir": checkpoint}})
    except ModelError:  # a folder of a tokenizer alone
        return None


@dataclass
class _Overrides:
    """Settings ``key=value`` for a file: of its reading, of its dataset, and of the tokenizer."""

    file: list[str]
    dataset: list[str]
    tokenizer: list[str]

    @classmethod
    def of(cls, overrides: list[str]) -> "_Overrides":
        """Sort the overrides of a command line."""
        sorted_overrides = cls([], [], [])
        for override in overrides:
            key = override.removeprefix("~").partition("=")[0]
            if key.startswith("tokenizer."):
                sorted_overrides.tokenizer.append(override.replace("tokenizer.", "", 1))
            elif key.removeprefix("dataset.") in _FILE_SETTINGS:
                sorted_overrides.file.append(override.replace("dataset.", "", 1))
            else:
                sorted_overrides.dataset.append(override.replace("dataset.", "", 1))
        return sorted_overrides


class DataPrepare(Subcommand):
    """Subcommand that tokenizes datasets."""

    name = "data prepare"
    help = "Tokenize the data of a config once, for any number of runs and processes"
    description = (
        "Tokenize the datasets of a config into a folder of memory-mapped files. A run with\n"
        "dataset.prepared=<folder> reads them without tokenizing. It stops with an error if the tokenizer, the\n"
        "template, the masks, the data or the code have changed. With --shard, jobs on any number of machines\n"
        "prepare parts of the rows in one shared folder, and tune data merge joins them."
    )
    epilog = """
        examples:
          $ tune data prepare my_config.yaml --output /data/prepared
          $ tune run --config my_config.yaml dataset.prepared=/data/prepared
          $ tune data prepare my_config.yaml --output /data/prepared --shard 0/16
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("config", help="name of a config, or path of a YAML file")
        add("overrides", nargs="*", default=[], help="key=value: settings of the config to change")
        add("--output", type=Path, required=True, help="folder for the tokenized data")
        add("--workers", type=int, help="number of tokenizing processes (default: one per core)")
        shard = "prepare one of n parts of the rows, i/n, counted from 0; a finished part is reused"
        add("--shard", metavar="i/n", help=shard)

    def _run(self, args: argparse.Namespace) -> None:
        from torchtune.datasets import Shard

        check_least(args, workers=1)
        shard = None
        if args.shard is not None:
            shard = Shard.parse(args.shard)
        output = args.output.expanduser()
        cfg = _read_settings(args.config, args.overrides)
        if shard is None:
            prepare_config(cfg, output, args.workers)
            return
        command = ["tune", "data", "prepare", args.config, *args.overrides, "--output", str(args.output)]
        prepare_shard(cfg, output, args.workers, shard, command)


def prepare_config(cfg: Any, output: Path, processes: int | None) -> None:
    """Tokenize the datasets of a recipe's settings into a folder.

    Args:
        cfg: settings of a training recipe.
        output: the folder; matching files in it are reused.
        processes: number of worker processes; by default one per core.

    Raises:
        DataError: rows cannot be trained on or written; no partial files are left.
    """
    from torchtune import config
    from torchtune.datasets import dataset_nodes, instantiate_dataset, preparing, workers
    from torchtune.estimate import context_length

    tokenizer = config.instantiate(cfg.tokenizer)
    max_seq_length = context_length(cfg)
    for name, node in (("dataset", cfg.dataset), ("dataset_val", cfg.dataset_val)):
        if node is None:
            continue
        started = time.monotonic()
        with preparing(output), workers(processes):
            dataset = instantiate_dataset(node, tokenizer, max_seq_length)
        tokens = dataset.num_known_tokens
        if tokens is None:  # the rows are tokenized during training
            raise _unprepared_error(name, dataset)
        kind = "packs" if dataset.is_packed else "rows"
        seconds = time.monotonic() - started
        print(f"{name}: {len(dataset):,} {kind}, {tokens:,} tokens in {output}, {seconds:.1f} s. Use them with")
        _print_use(name, output, is_single=dataset_nodes(node)[0] is node)


def _unprepared_error(name: str, dataset: Any) -> UserError:
    """Return the error for a dataset whose rows are tokenized during training."""
    if dataset.is_stream:
        return UserError(f"{name}: a stream is tokenized during training: remove streaming to prepare it.")
    return UserError(f"{name}: rows with images are tokenized during training: train without preparing them.")


def _print_use(name: str, output: Path, *, is_single: bool) -> None:
    """Print the setting that makes a run read prepared rows.

    Args:
        name: name of the setting of the dataset.
        output: folder of the rows.
        is_single: whether the setting is a dataset, and not a list or mixture of datasets.
    """
    if is_single:
        print(f"  {name}.prepared={output}")
    else:  # overrides cannot reach into a list of nodes
        print(f"  prepared: {output}  # in every node of {name}")


def prepare_shard(cfg: Any, output: Path, processes: int | None, shard: "Shard", command: list[str]) -> None:
    """Tokenize the rows of a shard of each dataset of a recipe's settings.

    Args:
        cfg: settings of a training recipe.
        output: the folder that all shards share; finished parts of the shard are reused.
        processes: number of worker processes; by default one per core.
        shard: the shard.
        command: command that prepares the shards, without its option ``--shard``.

    Raises:
        DataError: rows cannot be trained on or written.
        UserError: a dataset is tokenized during training.
    """
    from torchtune import config
    from torchtune.datasets import ShardWritten, instantiate_dataset, preparing_shard, workers, write_manifest

    tokenizer = config.instantiate(cfg.tokenizer)
    started = time.monotonic()
    records = []
    for name, setting in (("dataset", cfg.dataset), ("dataset_val", cfg.dataset_val)):
        for node in _leaf_datasets(setting):
            try:
                with preparing_shard(output, shard), workers(processes):
                    dataset = instantiate_dataset(node, tokenizer)
            except ShardWritten as written:  # the usual end: the rows are in files, and no dataset is built
                records.append({"name": name, **written.record})
            else:  # the dataset was built, so that its rows are tokenized during training
                raise _unprepared_error(name, dataset)
    write_manifest(output, shard, records, command)
    rows = sum(record["rows"] for record in records)
    tokens = sum(record["tokens"] for record in records)
    seconds = time.monotonic() - started
    print(f"shard {shard}: {rows:,} rows, {tokens:,} tokens in {shard.folder(output)}, {seconds:.1f} s. Join all with")
    print(f"  tune data merge {shlex.quote(str(output))}")


def _leaf_datasets(setting: Any) -> list[Any]:
    """Return the nodes of a dataset setting, also those of mixtures in lists and lists in mixtures."""
    from torchtune.datasets import dataset_nodes

    if setting is None:
        return []
    nodes = dataset_nodes(setting)
    if nodes[0] is setting:
        return nodes
    leaf_datasets = []
    for node in nodes:
        leaf_datasets += _leaf_datasets(node)
    return leaf_datasets


class DataMerge(Subcommand):
    """Subcommand that joins shards of tokenized data."""

    name = "data merge"
    help = "Check the shards of tune data prepare --shard, and join them for runs"
    description = (
        "Check that all shards in a folder are complete and were made with the same settings, tokenizer and data,\n"
        "and join them. The result equals that of tune data prepare without --shard, and does not need the folder\n"
        "shards in it any more."
    )
    epilog = """
        examples:
          $ tune data merge /data/prepared
          $ tune run --config my_config.yaml dataset.prepared=/data/prepared
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("output", type=Path, help="folder that tune data prepare --shard wrote to")

    def _run(self, args: argparse.Namespace) -> None:
        from torchtune.datasets import merge_shards

        output = args.output.expanduser()
        joined = merge_shards(output)
        nodes_of_name = Counter(dataset["name"] for dataset in joined)
        for dataset in joined:
            left_out = ""
            if dataset["left_out"]:
                left_out = f" ({dataset['left_out']:,} cannot be trained on)"
            print(
                f"{dataset['name']}: {dataset['shards']} shards, {dataset['rows']:,} rows{left_out}, "
                f"{dataset['tokens']:,} tokens in {output}. Use them with"
            )
            _print_use(dataset["name"], output, is_single=nodes_of_name[dataset["name"]] == 1)


class Data(Subcommand):
    """Subcommand that inspects and tokenizes datasets."""

    name = "data"
    help = description = "Inspect data before a run, and tokenize them once for many runs"

    def _add_arguments(self) -> None:
        subparsers = self._parser.add_subparsers(title="subcommands")
        DataShow(subparsers)
        DataPrepare(subparsers)
        DataMerge(subparsers)


def _read_settings(name: str, overrides: list[str]) -> Any:
    """Return the checked settings of a config with a dataset, for the recipe named in it."""
    from torchtune._recipe_registry import recipe_named_by, resolve_config
    from torchtune.config import SettingsView, load_and_check

    config = resolve_config(name)
    overrides = expand_shorthands(config, overrides)
    cfg = SettingsView.of(load_and_check(config, overrides, recipe_named_by(config, overrides).load_main()))
    if cfg.dataset is None:
        raise UserError("the config has no dataset: name a config of a recipe that trains.")
    return cfg
