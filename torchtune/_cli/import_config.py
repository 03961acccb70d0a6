"""``tune import``: convert configs of Axolotl, TRL, LLaMA-Factory and ms-swift; the keys are in a YAML table."""

import argparse
import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtune import config
from torchtune._cli.subcommand import Subcommand
from torchtune._recipe_registry import find_config, recipe_named_by
from torchtune.utils import UserError, atomic_write, read_json

if TYPE_CHECKING:
    from torchtune.datasets import RowFormat

LIBRARIES = ("axolotl", "trl", "llama-factory", "ms-swift")
# Keys and roles of turns, in conversations of either style.
_TAGS = {
    "role", "content", "user", "assistant", "system", "from", "value", "human", "gpt", "observation", "tool",
}  # fmt: skip
# Settings of validation, without the @ that the table of keys has before them.
_VALIDATION_KEYS = (
    "validates", "val_strategy", "val_interval", "vals_per_epoch", "val_size", "val_split", "val_datasets", "patience",
    "keeps_best", "best_metric", "best_is_greatest",
)  # fmt: skip
# Fields of a turn that say whether it is trained on.
_TRAINING_FIELDS = ("train", "loss")
# Axolotl's names of roles, as it maps them by default.
_AXOLOTL_ROLES = {"gpt": "assistant", "human": "user"}


class Import(Subcommand):
    """Subcommand that converts a config of another library."""

    name = "import"
    help = "Convert a config of Axolotl, TRL, LLaMA-Factory or ms-swift"
    description = (
        "Convert a YAML config of Axolotl, TRL (`trl sft --config`), LLaMA-Factory or ms-swift to one of ours:\n"
        "one that builds any model from its checkpoint. Every key without a counterpart is listed."
    )
    epilog = """
        examples:
          $ tune import qlora.yml
          $ tune import sft.yaml --from trl --output mine.yaml
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("file", type=Path, help="YAML file of the other library")
        self._parser.add_argument("--from", dest="library", choices=LIBRARIES, help="library")
        self._parser.add_argument("--output", type=Path, help="file to write (<name>_torchtune.yaml)")

    def _run(self, args: argparse.Namespace) -> None:
        import yaml

        output = args.output or Path(f"{args.file.stem}_torchtune.yaml")
        if output.exists():
            raise UserError(f"{output} exists: choose another --output.")
        converted = ImportedConfig(args.file, args.library)
        report = [f"{converted.library} config {args.file}, as a config of the recipe {converted.data['recipe']}."]
        sections = {
            "Without counterpart": converted.without_counterpart,
            "Done in another way": converted.differences,
            "No setting is needed": converted.covered,
        }
        for title, keys in sections.items():
            if keys:
                report.append(f"{title}:")
                report += [f"  {key}: {reason}" for key, reason in keys.items()]
        # The first line names the recipe; the report follows as comments.
        text = yaml.safe_dump(converted.data, sort_keys=False, allow_unicode=True)
        recipe_line, settings = text.split("\n", 1)
        comments = [f"# {line}" for line in report]
        with atomic_write(output, "w") as file:
            file.write("\n".join([recipe_line, *comments, "", settings]))
        print("\n".join(report), end="\n\n", flush=True)
        try:
            config.load_and_check(output, [], recipe_named_by(output).load_main())
        except UserError as error:
            unfinished = f"Written to {output}, which does not pass `tune validate`: correct it, and check it again."
            raise UserError(f"{unfinished}\n{error}") from error
        print(f"Written to {output}, which is well-formed.")
        folder = converted.data["checkpointer"]["checkpoint_dir"]
        if not Path(converted.repository).is_dir():
            print(f"  tune download {converted.repository} --output-dir {folder}")
        print(f"  tune run --config {output}")


@cache
def read_tables() -> dict[str, Any]:
    """Return the tables of keys and values, by library and kind; see ``imported_keys.yaml``."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("imported_keys.yaml").read_text(encoding="utf-8"))


class ImportedConfig:
    """Config of another library, converted to a config of this library.

    Args:
        path: the file.
        library: one of ``LIBRARIES``; by default the library that shares most keys with the file.

    Attributes:
        data: the converted config.
        repository: repository or folder of the base model.
        without_counterpart: keys without a counterpart -> reason.
        differences: keys that are converted to something a little different -> what it is.
        covered: keys that need no setting -> reason.

    Raises:
        UserError: the file is not valid, no table has its keys, it has no model or no datasets, or a value has a wrong
            form.
    """

    def __init__(self, path: Path, library: str | None = None) -> None:
        document = config.read_document(path)
        document.check()
        source_settings = document.data
        tables = read_tables()
        num_shared = {name: len(tables[name]["keys"].keys() & source_settings.keys()) for name in LIBRARIES}
        self.library = library or max(num_shared, key=lambda name: num_shared[name])
        self.path = path
        self._tables = tables
        self._table = tables[self.library]
        self.without_counterpart: dict[str, str] = {}
        self.differences: dict[str, str] = {}
        self.covered: dict[str, str] = {}
        self._settings: dict[str, Any] = {}
        self._keys_in_file: dict[str, str] = {}  # name of a setting -> the key that decides it
        excluding = self._table.get("excluding", ())
        if excluding and all(source_settings.get(key) is True for key in excluding):
            raise UserError(f"{path}: {' and '.join(excluding)} exclude each other in {self.library}: choose one.")
        # Settings whose names begin with @ decide something in the conversion; the others are settings here.
        # Several keys may decide one setting: the last one of the table does, in whatever order the file has them.
        ranks = {key: rank for rank, key in enumerate(self._table["keys"])}
        for key in sorted(source_settings, key=lambda key: ranks.get(key, len(ranks))):
            self._take(key, source_settings[key])
        # Where the file says nothing, the run is that of the other library's defaults, not of ours.
        names_in_file = set(self._settings)
        keys_in_file = self._keys_in_file.copy()
        for key, value in self._table["defaults"].items():
            name = self._table["keys"][key].split()[0]
            if name not in names_in_file:
                self._take(key, value)
        self._keys_in_file = keys_in_file  # the keys of the defaults are not in the file
        self.repository = self._settings.pop("@base", None)
        if self.repository is None or "@datasets" not in self._settings:
            raise UserError(
                f"{path}: no model and dataset of Axolotl, TRL, LLaMA-Factory or ms-swift: choose a file with both."
            )
        try:
            self.data = self._convert_config()
        except (AttributeError, TypeError) as error:  # for example, a list instead of a text
            raise UserError(f"{path}: {self.library} reads no value of this form: {error}: correct it.") from error

    def _take(self, key: str, value: Any) -> None:
        """Convert one setting, or record why it is not converted."""
        if value is None:
            self.covered[key] = "it is empty"
        elif key in self._table["keys"]:
            name, _, conversion = self._table["keys"][key].partition(" ")
            if name in self._settings and value in (False, ""):  # another key has decided it
                self.covered[key] = "it is off"
                return
            try:
                self._settings[name] = _convert(value, conversion)
                if value is not False:  # a key that is off need not be reported as left out
                    self._keys_in_file[name] = key
            except (ValueError, TypeError) as error:
                if name == "@reader":  # the method, without which nothing else is worth importing
                    raise UserError(f"{self.path}: {key}: this method cannot be imported, {error}.") from error
                self.without_counterpart[key] = str(error)
        elif value is False and key in self._tables["hints"]:
            self.covered[key] = "it is off"
        elif key in self._tables["covered"]:
            self.covered[key] = self._tables["covered"][key]
        else:
            self.without_counterpart[key] = self._tables["hints"].get(key, "not known")

    def _convert_config(self) -> dict[str, Any]:
        """Return the shipped config of the smallest model, with the model and all settings of the other config."""
        # Settings that decide something are taken out one by one; what is left then has the name of a setting here.
        take = self._settings.pop
        method = take("@method", "full")
        reader = take("@reader", "")
        is_distributed = bool(take("@distributed", 0))
        data = self._shipped_config(method, reader, is_distributed)
        converters = self._model_converters(method)
        if converters:
            data["model_converters"] = converters
        self._folder = take("@folder", "data")
        entries = self._entries(take("@datasets"), self._folder)
        nodes = [self._dataset(number, entry, reader) for number, entry in enumerate(entries)]
        data["dataset"] = nodes if len(nodes) > 1 else nodes[0]
        if {"@beta1", "@beta2"} & self._settings.keys():
            data["optimizer"]["betas"] = [take("@beta1", 0.9), take("@beta2", 0.999)]
        scheduler_arguments = take("@scheduler_arguments", {})
        save_strategy = take("@save_strategy", "steps")
        saves_per_epoch = take("@saves_per_epoch", 0)
        take("@column", None)  # which the datasets have read
        validation = {}
        for key in _VALIDATION_KEYS:
            validation[key] = take(f"@{key}", None)
        for key, value in self._settings.items():
            section, _, name = key.rpartition(".")
            if section == "dataset":
                self._set_dataset(nodes, name, value)
            elif section == "lora":
                if method != "full":  # libraries have defaults of LoRA for runs without it as well
                    converters[-1][name] = value
            elif section:
                data.setdefault(section, {})[name] = value
            else:
                data[name] = value
        for name, value in scheduler_arguments.items():
            argument = self._tables["values"]["scheduler_arguments"].get(name)
            if argument is None:
                self.without_counterpart[f"lr_scheduler_kwargs.{name}"] = "no schedule has such an argument"
            else:
                data.setdefault("lr_scheduler", {})[argument] = value
        self._set_validation(data, nodes, reader, validation)
        if saves_per_epoch:
            data["save_every_n_steps"] = _part_of_run(saves_per_epoch, data["epochs"])
        if save_strategy == "epoch":
            data["save_every_n_steps"] = "epoch"
        elif save_strategy != "steps":
            self.without_counterpart["save_strategy"] = (
                "a run saves by steps or epochs: set save_every_n_steps, or keep_best"
            )
        return self._finish(data)

    def _shipped_config(self, method: str, reader: str, is_distributed: bool) -> dict[str, Any]:
        """Return the shipped config of the smallest model for a method, with the paths of this model.

        Args:
            method: ``full``, ``lora`` or ``qlora``.
            reader: dataset builder of the method, "" if the rows say it.
            is_distributed: whether the run has several devices.
        """
        if reader == "preference_dataset":
            name = "lora_dpo_single_device"
        else:
            name = "full" if method == "full" else "lora"
            if not is_distributed:
                name += "_single_device"
        data = config.read_document(find_config(f"smol/135M_{name}")).data
        if is_distributed:
            self.covered["several devices"] = f"FSDP2 shards in the recipe {data['recipe']}"
        base = Path(self.repository)
        folder = f"/tmp/{base.name}"  # where tune download writes it
        if base.is_dir():
            folder = str(base)
        data["output_dir"] = f"/tmp/torchtune/{self.path.stem}"
        data["device"] = None  # the device of this machine, in place of the shipped config's
        data["model"] = {"_component_": "torchtune.models.from_hf_config", "checkpoint_dir": folder}
        data["tokenizer"] = {"_component_": "torchtune.tokenizers.hf_tokenizer", "path": folder}
        data["checkpointer"]["checkpoint_dir"] = folder
        return data

    def _model_converters(self, method: str) -> list[dict[str, Any]]:
        """Take the settings that change the modules of the model; return their converters, LoRA as the last one."""
        converters = []
        if self._settings.pop("@tiled_mlp", False):
            converters.append({"_component_": "torchtune.modules.TiledMLP"})
        noise = self._settings.pop("@neftune", None)
        if noise:
            converters.append({"_component_": "torchtune.modules.NEFTune", "alpha": noise})
        is_quantized = self._settings.pop("@quantized", False) or method == "qlora"
        if method == "full":
            return converters
        if is_quantized:  # before LoRA, whose matrices stay in the dtype of the run
            converters.append({"_component_": "torchtune.modules.low_precision.QuantizeBase"})
        converters.append({"_component_": "torchtune.modules.peft.LoRA"})
        return converters

    def _set_validation(
        self, data: dict[str, Any], nodes: list[dict[str, Any]], reader: str, settings: dict[str, Any]
    ) -> None:
        """Set the validation data, how often they are evaluated, and what follows from their loss.

        Args:
            data: the config, with the training data; it is changed.
            nodes: nodes of the training data.
            reader: dataset builder of the method, "" if the rows say it.
            settings: value of each of ``_VALIDATION_KEYS``, None if the file has none.
        """
        strategy = settings["val_strategy"]
        interval: float | str | None = None
        if settings["vals_per_epoch"]:
            interval = _part_of_run(settings["vals_per_epoch"], data["epochs"])
        elif strategy == "steps" or (strategy is None and settings["val_interval"]):
            # The interval of transformers is that of its logs by default.
            interval = settings["val_interval"] or data.get("log_every_n_steps", 1)
        elif strategy == "epoch" or (strategy is None and settings["validates"]):
            interval = "epoch"
        # Without a strategy and an interval, the interval stays None: validation is not asked for.
        is_off = strategy in (False, "no")  # YAML 1.1 reads no as false
        if is_off:
            self.covered["eval_strategy"] = "nothing is validated"
            self._leave_out_choices_by_validation("nothing is validated")
            return
        validation_nodes = self._validation_nodes(nodes, reader, settings, is_asked=interval is not None)
        if not validation_nodes:
            if interval is not None:
                data["run_val_every_n_steps"] = None
                self.without_counterpart["eval_strategy"] = f"set dataset_val, and run_val_every_n_steps={interval}"
            self._leave_out_choices_by_validation("it needs validation data: set dataset_val")
            return
        data["dataset_val"] = validation_nodes if len(validation_nodes) > 1 else validation_nodes[0]
        if interval is None:
            interval = "epoch"
            self.differences["eval_steps"] = "not set: validation runs once per epoch"
        data["run_val_every_n_steps"] = interval
        if settings["patience"]:
            data["early_stopping_patience"] = settings["patience"]
        if settings["keeps_best"]:
            metric = str(settings["best_metric"] or "loss").removeprefix("eval_")
            data["keep_best"] = f"val_{metric}"
            if settings["best_is_greatest"]:
                data["keep_best"] = f"max:val_{metric}"

    def _leave_out_choices_by_validation(self, reason: str) -> None:
        """Record the keys of the file that stop a run, or choose a checkpoint, by a validation that there is not."""
        for name in ("@patience", "@keeps_best", "@best_metric"):
            key = self._keys_in_file.get(name)
            if key is not None:
                self.without_counterpart[key] = reason

    def _validation_nodes(
        self, nodes: list[dict[str, Any]], reader: str, settings: dict[str, Any], *, is_asked: bool
    ) -> list[dict[str, Any]]:
        """Return the nodes of the validation data; rows that are held out of the training data leave it."""
        if settings["val_datasets"]:
            entries = self._entries(settings["val_datasets"], self._folder)
            validation_nodes = [self._dataset(number, entry, reader) for number, entry in enumerate(entries)]
            # Labels of the same kind, so that the two losses can be compared.
            for node, training_node in zip(validation_nodes, nodes, strict=False):
                if node["_component_"] == training_node["_component_"] and "masking_strategy" in training_node:
                    node.setdefault("masking_strategy", training_node["masking_strategy"])
            return validation_nodes
        size = settings["val_size"]
        if not size:
            split = settings["val_split"]
            if not split and self.library == "trl":
                split = "test"  # the default of TRL
            are_files = any(Path(str(node.get("source"))).is_file() for node in nodes)
            if not split or not is_asked or are_files:  # a file has no split besides train
                return []
            return [{**node, "split": split} for node in nodes]
        name = next(key for key, target in self._table["keys"].items() if target.startswith("@val_size"))
        # A share of the rows counts from the first row, a number of rows from the last one.
        is_share = size < 1
        if is_share:
            count = round(100 * size)
            boundary = f"{100 - count}%"
            held_out = f"{count}% of the rows"
        else:
            count = int(size)
            boundary = f"-{count}"
            held_out = f"{count} rows"
        if count == 0 or any("[" in str(node.get("split", "")) for node in nodes):
            self.without_counterpart[name] = (
                "set dataset.split and dataset_val.split to parts, such as train[:990] and train[990:]"
            )
            return []
        validation_nodes = []
        for node in nodes:
            split = node.get("split", "train")
            validation_nodes.append({**node, "split": f"{split}[{boundary}:]"})
            node["split"] = f"{split}[:{boundary}]"
        self.differences[name] = f"the last {held_out} are held out, not random ones"
        return validation_nodes

    def _finish(self, data: dict[str, Any]) -> dict[str, Any]:
        """Make the sections fit each other: a component that was chosen later may lack arguments of the one before.

        An argument of the loss that is lost is reported.
        """
        if data.get("max_steps"):  # instead of the limit of the shipped config
            data.pop("max_steps_per_epoch", None)
        if "project" in data["metric_logger"]:
            data["metric_logger"]["_component_"] = self._tables["values"]["logger"]["wandb"]
        for section in ("optimizer", "metric_logger"):
            parameters = _parameters_of(data[section])
            arguments = {key: value for key, value in data[section].items() if key in parameters}
            data[section] = {"_component_": data[section]["_component_"], **arguments}
        loss = data["loss"]
        if loss.get("reweighting") is not None:
            loss.pop("label_smoothing", None)  # which a reweighted loss lacks
        for key in loss.keys() - _parameters_of(loss) - {"_component_"}:
            value = loss.pop(key)
            if value:
                self.without_counterpart[f"loss.{key}"] = f"{loss['_component_']} has no such argument"
        if "lr_scheduler" in data:
            self._finish_scheduler(data["lr_scheduler"])
        return data

    def _finish_scheduler(self, scheduler: dict[str, Any]) -> None:
        """Convert a warmup to a number of steps or a part of the run, and list arguments that the schedule lacks."""
        warmup = scheduler.setdefault("num_warmup_steps", 0)
        if 0 < warmup < 1:  # a part of the run
            scheduler["warmup_ratio"] = warmup
            warmup = 0
        scheduler["num_warmup_steps"] = int(warmup)
        ratio = scheduler.get("warmup_ratio")
        if ratio is not None and (warmup or not ratio):
            del scheduler["warmup_ratio"]
            self.covered["warmup_ratio"] = "warmup_steps comes first"
        for key in scheduler.keys() - _parameters_of(scheduler) - {"_component_"}:
            del scheduler[key]
            self.without_counterpart[f"lr_scheduler.{key}"] = f"{scheduler['_component_']} has no such argument"

    def _set_dataset(self, nodes: list[dict[str, Any]], name: str, value: Any) -> None:
        """Set an argument of each dataset that has it; an entry of the datasets may have set it already."""
        for node in nodes:
            # The name of a subset is passed on to the hub by every dataset.
            if name == "name" or name in _parameters_of(node):
                node.setdefault(name, value)
            elif value and name != "masking_strategy":
                self.without_counterpart[name] = f"{node['_component_']} has no such argument"

    def _entries(self, datasets: Any, folder: str) -> list[dict[str, Any]]:
        """Return the descriptions of the datasets; LLaMA-Factory's are in ``dataset_info.json``."""
        if self.library != "llama-factory":
            if not isinstance(datasets, list):
                datasets = [datasets]
            entries = []
            for entry in datasets:
                if not isinstance(entry, dict):
                    entry = self._entry_of_name(str(entry))
                entries.append(entry)
            return entries
        index = self.path.parent / folder / "dataset_info.json"
        descriptions = {}
        if index.is_file():
            descriptions = read_json(index, UserError)
        names = datasets
        if isinstance(datasets, str):
            names = datasets.split(",")
        entries = []
        for name in names:
            name = name.strip()
            entry = descriptions.get(name, {"hf_hub_url": name})
            if entry.get("file_name"):  # relative to the folder of the index
                entry = {**entry, "file_name": str(index.parent / entry["file_name"])}
            if name not in descriptions:
                self.without_counterpart[f"dataset {name}"] = (
                    f"{index} does not describe it: set dataset.source and columns"
                )
            entries.append(entry)
        return entries

    def _entry_of_name(self, name: str) -> dict[str, Any]:
        """Return the description of a dataset of one name; ms-swift's ``name:subset#count`` takes rows of a subset."""
        if self.library != "ms-swift":
            return {"path": name}
        name, _, count = name.partition("#")
        path, _, subset = name.removeprefix("hf::").partition(":")
        entry = {"path": path}
        if subset:
            entry["name"] = subset
        if count:
            entry["split"] = f"train[:{count}]"
            self.differences[f"dataset {name}"] = f"the first {count} rows, not random ones"
        return entry

    def _dataset(self, number: int, entry: dict[str, Any], reader: str) -> dict[str, Any]:
        """Return the config node of one dataset."""
        node: dict[str, Any] = {"_component_": ""}  # set below, but written as the first key
        hints: dict[str, Any] = {"@column": self._settings.get("@column"), "@tags": {}, "@columns": {}, "@type": ""}
        for key, value in entry.items():
            name = self._table["data"].get(key)
            if name is None:
                self.without_counterpart[f"datasets.{number}.{key}"] = "not known"
            elif value is not None and name.startswith("@"):
                hints[name] = value
            elif value is not None:
                node[name] = value
        self._set_training(number, node, hints)
        if hints["@columns"].keys() - {"messages"}:
            self.without_counterpart[f"datasets.{number}.columns"] = "set dataset.column_map"
        unknown_tags = {str(tag) for tag in hints["@tags"].values()} - _TAGS
        if unknown_tags:
            self.without_counterpart[f"datasets.{number} tags"] = (
                f"turns have no {', '.join(sorted(unknown_tags))}: rename them"
            )
        builder = reader
        settings: Mapping[str, str] = {}
        if not reader:
            path = Path(str(node.get("data_files") or node.get("source"))).expanduser()
            # The rows themselves say more than the config.
            row_format = _most_frequent_format(path) or self._format_of_type(number, hints)
            builder = row_format.builder
            settings = dict(row_format.settings)
        if builder == "text_completion_dataset" and hints["@column"]:
            settings = {"column": hints["@column"]}
        node["_component_"] = f"torchtune.datasets.{builder}"
        return {**node, **settings}

    def _set_training(self, number: int, node: dict[str, Any], hints: dict[str, Any]) -> None:
        """Set which turns are trained on, as an entry of Axolotl says; flags in the rows are always read."""
        unsupported: dict[str, str] = {}
        roles = hints.get("@roles")
        if roles is not None:
            trained = {_AXOLOTL_ROLES.get(str(role), str(role)) for role in roles}
            if trained == {"assistant"}:
                node["masking_strategy"] = "train_on_assistant"
            elif trained >= {"assistant", "user"}:
                node["masking_strategy"] = "train_on_all"
            else:
                unsupported["roles_to_train"] = (
                    "masking_strategy trains on the assistant, or on users and tools as well: set train: false in the "
                    "turns of the others"
                )
        if hints.get("@ends") not in (None, "turn"):
            unsupported["train_on_eos"] = (
                "the end of each trained turn is trained on: set eot: false in turns without one"
            )
        field = hints.get("@training_field")
        if field in _TRAINING_FIELDS:
            self.covered[f"datasets.{number}.message_field_training"] = f"'{field}' of a turn is read"
        elif field is not None:
            unsupported["message_field_training"] = f"rename '{field}' of the turns to 'train', which is read"
        if hints.get("@training_detail") is not None:
            unsupported["message_field_training_detail"] = (
                "write the content of the turn as a list of texts, and train: false in those that are not trained on"
            )
        for key, reason in unsupported.items():
            self.without_counterpart[f"datasets.{number}.{key}"] = reason

    def _format_of_type(self, number: int, hints: dict[str, Any]) -> "RowFormat":
        """Return the format of rows that are not on this machine, from the type that the config names."""
        from torchtune.datasets import RowFormat, chat_format

        kind = str(hints["@type"])
        if kind.startswith("completion"):
            return RowFormat(kind, "text_completion_dataset")
        # LLaMA-Factory's default is Alpaca.
        if kind.startswith("alpaca") or (not kind and self.library == "llama-factory"):
            return RowFormat("Alpaca", "alpaca_dataset")
        # Another type is taken for conversations, as most data are, and reported for the user to check.
        if not kind.startswith(("chat_template", "sharegpt")):
            self.without_counterpart[f"datasets.{number} {kind}".strip()] = (
                "the columns are not known: check those of dataset"
            )
        role = hints["@tags"].get("role") or hints["@tags"].get("role_tag")
        if not role and kind.startswith("sharegpt"):
            role = "from"
        column = hints["@columns"].get("messages") or hints["@column"]
        if role == "from":
            return chat_format(column or "conversations", "sharegpt")
        return chat_format(column or "messages", "openai")


def _most_frequent_format(path: Path) -> "RowFormat | None":
    """Return the format of most rows of a file; None if there is no such file, or no dataset reads these rows."""
    from torchtune.datasets import scan

    if not path.is_file():
        return None
    facts = scan(path, everything=False)
    if not facts.formats or not facts.main_format.builder:
        return None
    return facts.main_format


def _parameters_of(node: Mapping[str, Any]) -> set[str]:
    """Return the names of the parameters of a config node's component."""
    return set(inspect.signature(config.locate(node["_component_"])).parameters)


def _part_of_run(times: int, epochs: int) -> float | str:
    """Return an interval that ends so many times per epoch: ``epoch``, or a fraction of the run."""
    if times == 1:
        return "epoch"
    return 1 / (times * epochs)


def _convert(value: Any, conversion: str) -> Any:
    """Convert a value; raise ``ValueError`` or ``TypeError`` if it has no counterpart."""
    if conversion == "whole":
        if float(value) != int(value):
            raise ValueError(f"{value} is not a whole number")
        return int(value)
    if conversion == "number":
        return float(value)
    if conversion == "interval":  # a number of steps, or a fraction of the run
        if 0 < float(value) < 1:
            return float(value)
        return _convert(value, "whole")
    if conversion == "positive":
        if value > 0:
            return value
        return None
    if not conversion:
        return value
    choices = read_tables()["values"][conversion]
    is_list = conversion in ("targets", "modules")
    if isinstance(value, list):
        values = value
    elif is_list and value is not True:  # names with commas between them
        values = str(value).split(",")
    else:
        values = [value]
    unknown = [item for item in values if item not in choices]
    if unknown or not values:
        raise ValueError(f"{unknown}: choose out of {', '.join(map(str, choices))}")
    names = [choices[item] for item in values]
    if not is_list:
        return names[0]
    # One target of another library may be several of ours, with commas between them.
    return ",".join(names).split(",")
