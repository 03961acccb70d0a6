"""Shorthands of a command line, ``model=``, ``teacher=`` and ``data=``: the settings that they stand for.

``tune run --config any_lora model=Qwen/Qwen3-4B data=chats.jsonl`` is ``tune run --config any_lora`` with
``model.checkpoint_dir=<folder>`` and ``dataset={_component_: …, source: chats.jsonl, …}``. Shorthands are expanded
before the config is checked, so everything after that sees settings alone. ``dataset_val=5%`` is one as well: the last
rows of ``dataset`` are held out.
"""

import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtune._cli.subcommand import find_checkpoint
from torchtune._hub import find_folder
from torchtune._recipe_registry import current_name, recipe_of
from torchtune.utils import UserError, cache_root, read_json

if TYPE_CHECKING:
    from torchtune.datasets import FileFacts, RowFormat

# Shorthand of a model -> section whose checkpoint it names.
_MODELS = {"model": "model", "teacher": "teacher_model"}
# Builders that make a model from the config.json of a checkpoint.
_MODEL_BUILDERS = (
    "torchtune.models.from_hf_config",
    "torchtune.models.image_text_model",
    "torchtune.models.lora_image_text_model",
)
# A shorthand without a value, as of a variable of the shell that is not set -> what it takes.
_EMPTY = {
    "model=": "name the folder of a checkpoint, a repository of the hub or a GGUF file",
    "teacher=": "name the folder of a checkpoint, a repository of the hub or a GGUF file",
    "data=": "name a file, a folder or a dataset of the hub",
}
# A share of the training data that is held out for validation, such as 5%.
_SHARE = re.compile(r"(\d{1,2})%")
# A dotted path of a component, such as torchtune.models.smol.smollm2_135m.
_COMPONENT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
# Setting of a dataset on the command line -> builders that have it, the usual one first.
_DATASET_BUILDERS = {
    "column_map.instruction": ("alpaca_dataset",),
    "column_map.chosen": ("preference_dataset",),
    "column_map.rejected": ("preference_dataset",),
    "column_map.completion": ("kto_dataset",),
    "column_map.label": ("kto_dataset",),
    "column_map.query": ("embedding_dataset",),
    "column_map.positive": ("embedding_dataset",),
    "column_map.conversations": ("multimodal.multimodal_chat_dataset",),
    "column_map.input": ("instruct_dataset", "alpaca_dataset", "multimodal.vqa_dataset"),
    "column_map.output": ("instruct_dataset", "alpaca_dataset", "multimodal.vqa_dataset"),
    "conversation_column": ("chat_dataset",),
    "conversation_style": ("chat_dataset",),
    "label_column": ("classification_dataset",),
    "column": ("text_completion_dataset", "prompt_dataset", "classification_dataset"),
}
# Beginnings of the settings of a dataset that name what is trained on: a column, or the builder with its columns.
_NAMES_OF_COLUMNS = ("conversation_column=", "column_map.", "column=", "_component_=")
# Rows of a hub dataset that are read to find its format.
_HUB_ROWS = 100

# What a recipe trains on, and the config for any model that trains on it.
_SUPERVISED = "conversations, instructions or texts"
_PAIRS = "preference pairs"
_LABELED = "labeled answers"
_PROMPTS = "prompts"
_RETRIEVED = "queries with passages"
_RERANKED = "queries with labeled documents"
_CONFIGS = {
    _SUPERVISED: "any_lora",
    _PAIRS: "any_dpo",
    _LABELED: "any_dpo loss=torchtune.rlhf.loss.KTOLoss",
    _PROMPTS: "any_grpo",
    _RETRIEVED: "any_lora",
    _RERANKED: "any_lora",
}
# Loss of the recipe dpo -> what it trains on, if it is not pairs.
_TRAINED_ON_BY_LOSS = {
    "KTOLoss": _LABELED,
    "InfoNCELoss": _RETRIEVED,
    "RerankBCELoss": _RERANKED,
    "RerankListwiseLoss": _RERANKED,
}
_TRAINED_ON = {
    "dpo": _PAIRS,
    "full_finetune_distributed": _SUPERVISED,
    "full_finetune_single_device": _SUPERVISED,
    "grpo": _PROMPTS,
    "knowledge_distillation": _SUPERVISED,
    "lora_finetune_distributed": _SUPERVISED,
    "lora_finetune_single_device": _SUPERVISED,
    "ppo": _PROMPTS,
}
_CLASSIFICATION_LOSS = "torchtune.modules.loss.ClassificationLoss"
# Losses of queries with texts, all of the recipe dpo -> what they train, and how a query is compared.
_RETRIEVAL_LOSSES = {
    "InfoNCELoss": "an embedding model, in which a query finds its positive among all passages of a batch",
    "RerankBCELoss": "a reranker, whose new head says of each pair whether it is relevant",
    "RerankListwiseLoss": "a reranker, whose new head orders the documents of a query",
}
# Smallest number of queries that are compared with each other, unless the command line sets it: fewer are too easy.
_SMALLEST_CONTRAST = 16
_COLLATE = {"embedding_dataset": "collate_embedding", "reranking_dataset": "collate_reranking"}
# Recipes whose configs for any model train on queries with texts, too, by the recipe dpo.
_RETRIEVAL_RECIPES = {
    "dpo",
    "full_finetune_distributed",
    "full_finetune_single_device",
    "lora_finetune_distributed",
    "lora_finetune_single_device",
}
# Builder of a dataset -> what it reads; other builders read what a supervised recipe trains on.
_READ_BY = {
    "preference_dataset": _PAIRS,
    "kto_dataset": _LABELED,
    "prompt_dataset": _PROMPTS,
    "embedding_dataset": _RETRIEVED,
    "reranking_dataset": _RERANKED,
}


def expand_shorthands(config: Path, overrides: list[str], recipe_name: str | None = None) -> list[str]:
    """Replace the shorthands among overrides by the settings that they stand for, and say what was found.

    ``model=`` and ``teacher=`` name the folder of a checkpoint or of a run, a GGUF file, or a repository on the hub, in
    a config whose model is built from the ``config.json`` of its checkpoint. ``data=`` names a file or folder of rows,
    or a dataset on the hub. ``dataset_val=5%`` holds the last rows of the dataset out for validation.

    Args:
        config: file of the config.
        overrides: ``key=value`` and ``~key`` of the command line.
        recipe_name: name of the recipe on the command line, if any, which the rows then cannot choose.

    Returns:
        The settings found, then the other overrides in their order; a ``model=`` or ``data=`` that turns out to be no
        shorthand comes after them. ``recipe=dpo`` is among the settings if the rows are for this recipe.

    Raises:
        UserError: a model or the data cannot be found or read, the rows have several readings, or the recipe does not
            train on such rows.
    """
    for override in overrides:
        if override in _EMPTY:
            raise UserError(f"{override} is empty: {_EMPTY[override]}.")
    shorthands, other_overrides = _separate_shorthands(overrides)
    held_out = shorthands.pop("dataset_val", None)
    if held_out is None and not shorthands:
        return overrides
    from torchtune.config import apply_overrides, read_document

    document = read_document(config)
    apply_overrides(document, other_overrides)
    recipe = current_name(str(document.data.get("recipe") or recipe_of(config) or ""))
    settings: list[str] = []
    for key, value in shorthands.items():
        section = document.data.get(_MODELS.get(key, "dataset"))
        if key == "data" and section is not None and "data" not in document.data:
            data_settings = _DataSettings(value, document.data, recipe, other_overrides, config.stem).overrides()
            chooses_recipe = any(setting.startswith("recipe=") for setting in data_settings)
            if recipe_name is not None and chooses_recipe:
                raise UserError(
                    f"data={value}: the recipe {recipe_name} does not train on such rows: leave out its name, so that "
                    "they choose the recipe."
                )
            settings += data_settings
        elif key in _MODELS and _names_checkpoint(section, value):
            folder = _checkpoint_folder(key, value)
            settings.append(f"{_MODELS[key]}.checkpoint_dir={folder}")
        else:  # a setting of the user's own recipe, or a model's builder
            other_overrides.append(f"{key}={value}")
    expanded = [*settings, *other_overrides]
    if held_out is not None:
        # The dataset may be one that data= has chosen: read the config as it is now.
        document = read_document(config)
        apply_overrides(document, expanded)
        expanded += _held_out_rows(held_out, document.data)
    return expanded


def _held_out_rows(share: str, config: Mapping[str, Any]) -> list[str]:
    """Return the overrides that train on the first rows of the dataset, and validate on the share at its end."""
    dataset = config.get("dataset")
    if not isinstance(dataset, Mapping) or "datasets" in dataset or dataset.get("streaming"):
        raise UserError(f"dataset_val={share}: the dataset must be one source, and not streamed: name validation data.")
    split = str(dataset.get("split", "train"))
    if "[" in split:
        raise UserError(f"dataset_val={share}: dataset.split={split} takes a part of the rows: set dataset_val.split.")
    percent = int(_SHARE.fullmatch(share)[1])
    if percent == 0:
        raise UserError("dataset_val=0%: there would be no validation data: leave it out.")
    validation = {**dataset, "split": f"{split}[{100 - percent}%:]"}
    overrides = [f"dataset.split={split}[:{100 - percent}%]", f"dataset_val={json.dumps(validation)}"]
    if config.get("run_val_every_n_steps") is None:
        overrides.append("run_val_every_n_steps=epoch")
    _say("validation", f"the last {share} of the rows are held out")
    return overrides


def _separate_shorthands(overrides: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the value of each shorthand, and the other overrides; the last value of a shorthand counts."""
    shorthands = {}
    other_overrides = []
    for override in overrides:
        key, equals, value = override.partition("=")
        is_section = value.startswith(("{", "[")) or "${" in value
        names_a_source = key in (*_MODELS, "data") and equals and value and not is_section
        holds_rows_out = key == "dataset_val" and _SHARE.fullmatch(value)
        if names_a_source or holds_rows_out:
            shorthands[key] = value
        else:
            other_overrides.append(override)
    return shorthands, other_overrides


def _names_checkpoint(section: Any, name: str) -> bool:
    """Return whether the value of a model's section is a checkpoint, and not the dotted path of a builder.

    Args:
        section: section of the model in the config, which builds it from a checkpoint or with sizes of its own.
        name: value of the shorthand.
    """
    if not isinstance(section, Mapping) or section.get("_component_") not in _MODEL_BUILDERS:
        return False
    is_path = name.endswith(".gguf") or os.path.exists(name)
    return is_path or _COMPONENT.fullmatch(name) is None


def _say(topic: str, text: str) -> None:
    """Print what was found: to stderr, because `tune cat` prints a config to stdout."""
    print(f"{topic:<11} {text}", file=sys.stderr, flush=True)


def _checkpoint_folder(key: str, name: str) -> Path:
    """Return the folder of a checkpoint that ``key=name`` names; it is downloaded or converted once."""
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"{key}={name}: there is no such file: correct the path.")
        folder = _folder_of_gguf(path)
    else:
        try:
            # The checkpoint of a run, a folder as it is, or the download of a repository.
            folder, _ = find_folder(find_checkpoint(name))
        except UserError as error:
            if str(error).startswith(name):  # the message names it already
                raise UserError(f"{key}={error}") from error
            raise UserError(f"{key}={name}: {error}") from error
    config_file = folder / "config.json"
    if not config_file.is_file():
        gguf_files = sorted(folder.glob("*.gguf"))
        if gguf_files:
            raise UserError(f"{key}={name}: the folder has GGUF files alone: name one of them, {key}={gguf_files[0]}.")
        raise UserError(
            f"{key}={name}: there is no config.json in {folder}: give a checkpoint in Hugging Face's format."
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(f"{key}={name}: there are no weights in {folder}: name a checkpoint that has them.")
    architecture = "of no named architecture"
    architectures = read_json(config_file, UserError).get("architectures")
    if isinstance(architectures, list) and architectures:
        architecture = architectures[0]
    text = f"{name}: {architecture}"
    if folder != path:
        text += f", in {folder}"
    _say(key, text)
    return folder


def _folder_of_gguf(path: Path) -> Path:
    """Return the folder of a checkpoint with the contents of a GGUF file; an unchanged file is converted once."""
    from torchtune.checkpoints import gguf_to_hf

    facts = path.stat()
    identity = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    folder = cache_root() / "gguf" / f"{path.stem}-{digest}"
    if not (folder / "config.json").is_file():
        _say("GGUF", f"{path}: its weights are written as bf16 to {folder}, once")
        folder.parent.mkdir(parents=True, exist_ok=True)
        gguf_to_hf(path, folder)
    return folder


class _DataSettings:
    """The settings that ``data=`` stands for.

    Args:
        name: file, folder or hub dataset.
        config: settings of the config.
        recipe: name of the recipe.
        overrides: the other overrides of the command line; those of ``dataset.`` help to read the rows.
        config_name: name of the config.
    """

    def __init__(
        self, name: str, config: Mapping[str, Any], recipe: str, overrides: Collection[str], config_name: str
    ) -> None:
        self._name = name
        self._path = Path(name).expanduser()
        self._config = config
        self._recipe = recipe
        self._overrides = overrides
        self._dataset_overrides = []  # settings of the dataset on the command line
        for override in overrides:
            if override.startswith("dataset."):
                self._dataset_overrides.append(override.removeprefix("dataset."))
        self._config_name = config_name

    def overrides(self) -> list[str]:
        """Return the overrides that set the dataset, and what the rows ask of other sections."""
        facts = self._read_rows()
        row = facts.example
        row_format = self._format_for_recipe(facts.format, row)
        # Settings on the command line may name the columns of rows whose format is not known.
        if not row_format.builder and not self._dataset_overrides:
            if facts.defect:
                raise UserError(
                    f"data={self._name}: no dataset reads its rows: {facts.defect}: correct the rows, or name columns "
                    "that hold texts."
                )
            columns = ", ".join(row)
            if self._path.suffix.lower() in (".csv", ".tsv"):
                columns += " (those of a table are in its first line)"
            raise UserError(
                f"data={self._name}: no dataset reads rows with the columns {columns}: name those that "
                "are read, for example with dataset.column_map.input=... dataset.column_map.output=..., or with "
                "dataset.column=... for plain text."
            )
        source = str(self._path) if self._path.exists() else self._name
        node = dataset_node(source, row_format, self._dataset_overrides, facts.defect)
        builder = node["_component_"].removeprefix("torchtune.datasets.")
        self._check_method(row_format.kind, builder)
        columns = " ".join(f"{name}={value}" for name, value in row_format.settings)
        description = row_format.kind if row_format.builder else "columns as named"
        _say("data", f"{self._name}: {description}, read by {node['_component_']} {columns}".rstrip())
        settings = [f"dataset={json.dumps(node, ensure_ascii=False)}"]
        model = self._config.get("model") or {}
        if builder.startswith("multimodal.") and model.get("_component_") == "torchtune.models.from_hf_config":
            # A config for images has these settings.
            tokenizer = {
                "_component_": "torchtune.models.image_text_transform",
                "path": "${model.checkpoint_dir}",
                "max_seq_len": None,
            }
            settings += ["model.images=True", f"tokenizer={json.dumps(tokenizer)}"]
        if self._adapts_to_retrieval():
            settings += self._retrieval_settings(node, builder)
        # Other configs name a model with its outputs themselves.
        if builder == "classification_dataset" and self._config_name.startswith("any_"):
            settings += self._classifier_settings(node)
        return settings + self._reward_settings(row, node)

    def _read_rows(self) -> "FileFacts":
        """Return the facts about the first rows: they have one format, and one reading.

        Bad rows of the format are left to the dataset, which refuses or skips them.
        """
        from torchtune.datasets import SAMPLE, scan, scan_rows

        if self._path.exists():
            facts = scan(self._path, everything=False, split=self._split(), at_most=SAMPLE)
        else:
            facts = scan_rows(self._name, self._hub_rows())
        if not facts.formats:
            line, reason = facts.problems[0]
            raise UserError(f"data={self._name}: no row can be used: line {line}: {reason}.")
        # Without settings, the chat dataset reads conversations of all formats.
        reads_all_formats = facts.format.builder == "chat_dataset" and not facts.format.settings
        if not reads_all_formats:
            most_frequent_first = [counted_format for counted_format, _ in facts.formats.most_common()]
            self._refuse_several_formats(most_frequent_first, facts.firsts)
        self._refuse_several_readings(facts.format, facts.example)
        return facts

    def _split(self) -> str:
        """Return the split that is read: of the command line, or ``train``."""
        split = "train"
        for setting in self._dataset_overrides:
            key, _, value = setting.partition("=")
            if key == "split":
                split = value  # the last one counts
        return split

    def _hub_rows(self) -> list[Mapping[str, Any]]:
        """Return the first rows of a dataset on the hub."""
        from torchtune.datasets import load_rows

        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self._name) or self._name.startswith("."):
            raise UserError(
                f"data={self._name}: there is no such file or folder, and a dataset of the hub is called owner/name."
            )
        arguments = {"split": self._split(), "streaming": True}
        for setting in self._dataset_overrides:
            key, _, value = setting.partition("=")
            if key in ("name", "data_files", "data_dir"):
                arguments[key] = value
        return list(itertools.islice(load_rows(self._name, **arguments), _HUB_ROWS))

    def _refuse_several_formats(self, formats: list["RowFormat"], firsts: Mapping["RowFormat", int]) -> None:
        """Refuse rows of two formats: a dataset reads one of them."""
        builders = {row_format.builder for row_format in formats}
        # Rows with images are of several formats if some of them lack the tag of an image; one builder reads them.
        are_of_images = len(builders) == 1 and builders.pop().startswith("multimodal.")
        if len(formats) < 2 or are_of_images:
            return
        readings = []
        for row_format in formats[:2]:
            description = str(row_format) if row_format.builder else "columns that no dataset reads"
            readings.append(f"{description} from row {firsts[row_format]}")
        raise UserError(
            f"data={self._name}: the rows are of two formats, {' and '.join(readings)}: split the file, because a "
            "dataset reads one of them."
        )

    def _refuse_several_readings(self, row_format: "RowFormat", row: Mapping[str, Any]) -> None:
        """Refuse a row that holds two conversations or two answers, unless the command line chooses one."""
        from torchtune.datasets import readings_of

        if self._names_columns() or row_format.builder not in ("chat_dataset", "instruct_dataset"):
            return
        readings = [reading for reading in readings_of(row) if reading.builder == row_format.builder]
        if len(readings) < 2:
            return
        choices = []
        for reading in readings[:2]:
            choices.append(" ".join(f"dataset.{name}={value}" for name, value in reading.settings))
        raise UserError(
            f"data={self._name}: the rows can be read in two ways: add either {' or '.join(choices)} to choose one."
        )

    def _names_columns(self) -> bool:
        """Return whether the command line names what is trained on, columns or a builder."""
        return any(setting.startswith(_NAMES_OF_COLUMNS) for setting in self._dataset_overrides)

    def _format_for_recipe(self, row_format: "RowFormat", row: Mapping[str, Any]) -> "RowFormat":
        """Return the format as the recipe reads it: questions with answers may be prompts, and labels answers."""
        from torchtune.datasets import INSTRUCTIONS, PROMPTS_WITH_ANSWERS, RAW_TEXT, RowFormat, column_map

        settings = dict(row_format.settings)
        trained_on = _TRAINED_ON.get(self._recipe)
        if row_format.builder == "embedding_dataset" and self._trains_reranker(settings, row):
            return RowFormat("queries with passages", "reranking_dataset", row_format.settings)
        # The kind decides: conversational prompts with completions have the same builder, and are not read as prompts.
        if trained_on == _PROMPTS and row_format.kind == INSTRUCTIONS:
            return RowFormat(PROMPTS_WITH_ANSWERS, "prompt_dataset", (("column", settings["column_map.input"]),))
        # Questions with answers such as "#### 3" (GSM8K) are prompts, and instructions for a supervised recipe.
        is_question = row_format.builder == "prompt_dataset" and settings.get("column") == "question"
        if trained_on == _SUPERVISED and is_question:
            return RowFormat(INSTRUCTIONS, "instruct_dataset", column_map(input="question", output="answer"))
        if row_format.builder == "classification_dataset" and self._loss_name() != "ClassificationLoss":
            # The config trains a language model, for which a label is an answer if it is a text.
            if "column" in settings:
                raise UserError(
                    f"data={self._name}: the rows are labeled conversations without an answer, from which a classifier "
                    f"learns: add loss={_CLASSIFICATION_LOSS}, or add the answers."
                )
            if isinstance(row["label"], str):
                _say("labels", f"are trained as answers; loss={_CLASSIFICATION_LOSS} trains a classifier")
                return RowFormat(row_format.kind, "instruct_dataset", column_map(input="text", output="label"))
            if not self._names_columns():
                raise UserError(
                    f"data={self._name}: the labels are no texts, which a language model could answer: add "
                    f"loss={_CLASSIFICATION_LOSS} for a classifier, or dataset.column=text to train on the texts alone."
                )
            return RowFormat(RAW_TEXT, "text_completion_dataset", (("column", "text"),))
        return row_format

    def _classifier_settings(self, node: Mapping[str, Any]) -> list[str]:
        """Return the settings of a model with an output for each class of the data, or one for a regression.

        Args:
            node: section of the dataset.
        """
        from torchtune.data import DataError
        from torchtune.datasets import REGRESSION, class_counts, load_rows, problem_type_of

        arguments = {key: node[key] for key in ("name", "data_files", "data_dir") if key in node}
        arguments["split"] = self._split()
        column = node.get("label_column", "label")
        rows = load_rows(node["source"], **arguments)  # all of them: the first rows may lack a class
        label_values = [row[column] for row in rows if row.get(column) is not None]
        try:
            problem_type = node.get("problem_type") or problem_type_of(label_values)
        except DataError as error:
            raise UserError(f"data={self._name}: {error}.") from error
        if problem_type == REGRESSION:
            _say("classifier", "one number per row (regression)")
            return self._head_settings(1)
        class_names = node.get("labels") or list(class_counts(label_values))
        _say("classifier", f"{len(class_names)} classes ({problem_type})")
        return self._head_settings(len(class_names))

    def _adapts_to_retrieval(self) -> bool:
        """Return whether queries with texts may change the recipe, the loss and the model's head.

        That is so in the configs for any model, unless the command line names a loss of something else.
        """
        is_for_any_model = self._config_name.startswith("any_") and self._recipe in _RETRIEVAL_RECIPES
        return is_for_any_model and (self._loss_name() in _RETRIEVAL_LOSSES or not self._is_overridden("loss"))

    def _is_overridden(self, key: str) -> bool:
        """Return whether the command line sets a component of the config."""
        return any(override.startswith((f"{key}=", f"{key}._component_=")) for override in self._overrides)

    def _trains_reranker(self, columns: Mapping[str, str], row: Mapping[str, Any]) -> bool:
        """Return whether queries with passages are for a reranker, which the loss or the dataset says.

        Raises:
            UserError: nothing says it, and the rows have negatives, as rerankers need them.
        """
        components = [setting for setting in self._dataset_overrides if setting.startswith("_component_=")]
        if components:
            return components[-1].endswith(".reranking_dataset")
        loss = self._loss_name()
        if loss in _RETRIEVAL_LOSSES or not self._adapts_to_retrieval():
            return loss in ("RerankBCELoss", "RerankListwiseLoss")
        if row.get(columns.get("column_map.negatives", "negatives")):
            raise UserError(
                f"data={self._name}: queries with negatives train two kinds of models: add "
                "loss=torchtune.rlhf.loss.InfoNCELoss for an embedding model, or "
                "loss=torchtune.rlhf.loss.RerankBCELoss for a reranker."
            )
        return False

    def _retrieval_settings(self, node: dict[str, Any], builder: str) -> list[str]:
        """Return what queries with texts ask of the other sections: recipe, loss, batches, and the head of a reranker.

        Args:
            node: section of the dataset; a loss of lists makes it listwise.
            builder: builder of the dataset.
        """
        if builder not in _COLLATE:
            return []
        settings = []
        loss = self._loss_name()
        if loss not in _RETRIEVAL_LOSSES:
            loss = "InfoNCELoss" if builder == "embedding_dataset" else "RerankBCELoss"
        _say("loss", f"torchtune.rlhf.loss.{loss}, for {_RETRIEVAL_LOSSES[loss]}")
        if self._recipe != "dpo":  # the recipe of all losses that compare sequences
            settings.append("recipe=dpo")
        if not any(override.startswith("~loss.") for override in self._overrides):
            # The whole section, because the loss of the config may have other settings. A removal among the overrides
            # is applied after this section, and would not find its key.
            settings.append(f'loss={{"_component_": "torchtune.rlhf.loss.{loss}"}}')
        settings.append(f"collate_fn=torchtune.data.{_COLLATE[builder]}")
        if builder == "embedding_dataset":
            return settings + self._contrastive_batches()
        if loss == "RerankListwiseLoss":
            settings.append("dataset.listwise=True")
        return settings + self._head_settings(1)  # the score of a pair

    def _contrastive_batches(self) -> list[str]:
        """Return the settings of one micro-batch a step, in which queries are compared with all passages."""
        names = ("batch_size", "gradient_accumulation_steps")
        if any(override.partition("=")[0] in names for override in self._overrides):
            return []
        batch_size = self._config["batch_size"] * self._config.get("gradient_accumulation_steps", 1)
        batch_size = max(batch_size, _SMALLEST_CONTRAST)
        _say("batches", f"{batch_size} queries that are compared with each other; loss.texts_per_pass=4 saves memory")
        return [f"batch_size={batch_size}", "gradient_accumulation_steps=1"]

    def _head_settings(self, num_outputs: int) -> list[str]:
        """Return the settings of a model with a new head of so many outputs, which adapters train whole."""
        settings = []
        model = self._config.get("model") or {}
        if model.get("_component_") in _MODEL_BUILDERS:
            settings += [
                "model._component_=torchtune.modules.classifier_model",
                f"model.num_classes={num_outputs}",
                f"model.base_model_path={model['_component_']}",
            ]
        if self._is_overridden("model_converters"):
            return settings
        for number, converter in enumerate(self._config.get("model_converters") or ()):
            if str(converter.get("_component_")).endswith(".LoRA") and "train_modules" not in converter:
                settings.append(f'model_converters.{number}.train_modules=["score"]')
        return settings

    def _loss_name(self) -> str | None:
        """Return the name of the loss's class; None if the config has no loss."""
        loss = self._config.get("loss")
        if not isinstance(loss, Mapping):
            return None
        return str(loss.get("_component_")).rpartition(".")[2]

    def _check_method(self, kind: str, builder: str) -> None:
        """Refuse rows that the recipe does not train on, and name the config that does."""
        trained_on = _TRAINED_ON.get(self._recipe)
        if trained_on is None:  # a recipe of the user's own
            return
        trained_on = _TRAINED_ON_BY_LOSS.get(self._loss_name(), trained_on)
        read = _READ_BY.get(builder, _SUPERVISED)
        if read == trained_on:
            return
        if builder in _COLLATE and self._adapts_to_retrieval():
            loss = self._loss_name()
            is_for_reranker = builder == "reranking_dataset"
            if loss not in _RETRIEVAL_LOSSES or is_for_reranker == loss.startswith("Rerank"):
                return  # the settings of the rows change the recipe and the loss
            raise UserError(
                f"data={self._name}: {loss} trains on {trained_on}, and the rows are {kind}, read by {builder}: leave "
                "out the loss, which the rows then choose."
            )
        config, _, setting = _CONFIGS[read].partition(" ")
        if self._config_name.endswith("_distributed"):
            config += "_distributed"
        remedy = f"--config {config}"
        if setting:
            remedy += f" {setting}"
        raise UserError(
            f"data={self._name}: the rows are {kind}, and {self._config_name} trains on {trained_on}: use {remedy}."
        )

    def _reward_settings(self, row: Mapping[str, Any], node: Mapping[str, Any]) -> list[str]:
        """Return the column of the right answer, where the only reward expects another one."""
        from torchtune.datasets import readings_of

        rewards = self._config.get("rewards")
        # Several rewards are the user's own, because any_grpo has one: each may compare with a column of its own.
        if not isinstance(rewards, list) or len(rewards) != 1 or not isinstance(rewards[0], Mapping):
            return []
        is_number = str(rewards[0].get("_component_")).endswith(".NumberMatch")
        if not is_number or "column" in rewards[0] or "answer" in row:  # the default column is 'answer'
            return []
        for reading in readings_of(row):
            columns = dict(reading.settings)
            column = columns.get("column_map.output")  # a conversation has no column of an answer
            if column is not None and columns["column_map.input"] == node.get("column"):
                _say("reward", f"the last number of the answer is compared with that of column '{column}'")
                return [f"rewards.0.column={column}"]
        raise UserError(
            f"data={self._name}: the reward compares answers with column 'answer', which the rows lack: name the "
            "column of the right answer, rewards.0.column=..., or another reward, rewards=[{_component_: ...}]."
        )


def dataset_node(path: str | Path, row_format: "RowFormat", overrides: list[str], defect: str = "") -> dict[str, Any]:
    """Return a dataset node that reads the file.

    Args:
        path: the file.
        row_format: format of its rows.
        overrides: settings of the dataset; ``_component_``, or a setting that the format's builder does not have,
            chooses another builder.
        defect: why no dataset reads the rows, if that is so.

    Raises:
        UserError: no builder is known for the rows and the settings.
    """
    settings = [f"{name}={value}" for name, value in row_format.settings]
    # Removals are left out, because there is nothing to remove yet.
    changes = changed({}, [override for override in overrides if not override.startswith("~")])
    component = changes.get("_component_")
    if component is None:
        builder = _builder_of(row_format.builder, changes)
        if not builder and defect:
            raise UserError(
                f"{path}: no dataset reads its rows: {defect}: correct the rows, or name columns that hold texts."
            )
        if not builder:
            raise UserError(
                f"{path}: no dataset reads rows of these columns: name them, for example with column_map.input=... "
                "column_map.output=..., or use a config."
            )
        component = f"torchtune.datasets.{builder}"
    if component != f"torchtune.datasets.{row_format.builder}":
        settings = []  # which name columns for the builder of the format
    return changed({"_component_": component, "source": str(path)}, [*settings, *overrides])


def _builder_of(name: str, changes: Mapping[str, Any]) -> str:
    """Return the builder of a format, or the usual one of the first setting that it does not have."""
    keys = set(changes)
    columns = changes.get("column_map")
    if isinstance(columns, Mapping):
        keys.update(f"column_map.{column}" for column in columns)
    for key, builders in _DATASET_BUILDERS.items():
        if key in keys and name not in builders:
            return builders[0]
    return name


def changed(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return plain settings with overrides applied; raise ``ConfigError`` if one is not possible."""
    from torchtune.config import Document, apply_overrides

    document = Document(data)
    apply_overrides(document, overrides)
    document.check()
    return document.data
