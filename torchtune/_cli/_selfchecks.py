"""Checks of ``tune selfcheck``: short runs of a recipe must agree, and labels must match the conversations."""

import dataclasses
import inspect
import json
import shutil
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import torchtune
from torchtune._cli._export import Check, Trained, check_files, find_trained
from torchtune._cli._processes import call_in_child_process
from torchtune._cli.run import run_here
from torchtune._recipe_registry import RecipeTarget
from torchtune.config import apply_overrides, instantiate, load_and_check, locate, read_document, settings_of
from torchtune.datasets import instantiate_collate, instantiate_dataset
from torchtune.evaluation import EvaluationError
from torchtune.modules.loss import setup_loss
from torchtune.tokenizers import document_texts, is_trained
from torchtune.utils import UserError

_ROWS = 4  # rows of a run, from each dataset
_LABEL_ROWS = 64
# Maximum number of tokens before an answer that are trained together with the answer: the header that names the role.
_MAX_HEADER_TOKENS = 16
_DEGREES = ("tensor_parallel_dim", "context_parallel_dim", "expert_parallel_dim", "data_parallel_replicate_dim")
# Settings of all runs, if the recipe has them.
_SHORT = {
    **dict.fromkeys(_DEGREES, 1),
    "dataset_val": None,
    "run_val_every_n_steps": None,
    "keep_best": None,
    "early_stopping_patience": None,
    "scores": [],
    "profiler": None,
    "compile": False,
    "enable_async_checkpointing": False,
    "save_adapter_weights_only": False,
    "resume_from_checkpoint": False,
    "log_every_n_steps": 1,
    "log_level": "ERROR",
    "seed": 1,
    "shuffle": False,
    "save_every_n_steps": None,
    "save_every_n_minutes": None,
    "max_steps": None,
    "gradient_accumulation_steps": 1,
}
# Plain SGD reveals a gradient with a wrong scale; Adam divides by it.
_PLAIN = {
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},
    "lr_scheduler": None,
    "clip_grad_norm": None,
    "optimizer_in_bwd": False,
    "epochs": 2,
    "max_steps_per_epoch": 1,
}


class CheckFailed(UserError):
    """Raised by a check that fails."""


class NotChecked(UserError):
    """Raised by a check that does not apply."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict of a check: ``passed``, ``failed`` or ``not checked``, the reason, and where to see more."""

    name: str
    state: str
    reason: str
    more: str


def selfcheck(recipe: RecipeTarget, config: Path, overrides: list[str], folder: Path) -> Iterator[Verdict]:
    """Yield the verdicts of all checks.

    Args:
        recipe: the recipe.
        config: its config.
        overrides: settings that replace the config's.
        folder: empty folder of the runs.

    Raises:
        UserError: the config has mistakes, or is not of a recipe that trains.
    """
    checks = _Checks(recipe, config, overrides, folder)
    show = f"tune data show {' '.join([str(config), *overrides])} --examples {_ROWS}"
    for name, check, details in (
        ("accumulation", checks.accumulation, f"{folder}/whole.log, accumulated.log and the configs beside them"),
        ("packing", checks.packing, f"{folder}/whole.log, packed.log and the configs beside them"),
        ("resume", checks.resume, f"{folder}/uninterrupted.log, resumed.log and the configs beside them"),
        ("save and load", checks.load, f"{folder}/whole/epoch_0, and the log {folder}/whole.log"),
        ("labels", checks.labels, show),
        ("end of turn", checks.end_of_turn, show),
    ):
        try:
            verdict = Verdict(name, "passed", check(), details)
        except NotChecked as error:
            verdict = Verdict(name, "not checked", str(error), details)
        except UserError as error:
            verdict = Verdict(name, "failed", str(error), details)
        yield verdict


class _Checks:
    """Checks of a recipe; each method returns its observation as text, or raises."""

    def __init__(self, recipe: RecipeTarget, config: Path, overrides: list[str], folder: Path) -> None:
        main = recipe.load_main()
        document = read_document(config)
        load_and_check(config, overrides, main)  # raises if there are mistakes; the runs change the plain settings
        apply_overrides(document, overrides)
        for name in ("dataset", "tokenizer", "checkpointer"):
            if name not in document.data:
                raise UserError(f"the config has no {name}: name a config of a recipe that trains.")
        self._recipe = recipe
        self._folder = folder
        self._data = document.data
        settings = settings_of(main)
        fields = dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()
        # A recipe without a settings dataclass has at least the settings of its config.
        self._setting_names = {field.name for field in fields} or {*self._data}
        # The runs are compared in float32, unless the user chooses another dtype.
        if not any(text.startswith("dtype=") for text in overrides):
            self._data["dtype"] = "fp32"
        # Relative difference that another order of additions may cause, with room for several layers.
        self._tolerance = 1e-5 if self._data["dtype"] == "fp32" else 1e-2
        if "max_seq_len" in _arguments(self._data["tokenizer"]) and not self._data["tokenizer"].get("max_seq_len"):
            self._data["tokenizer"]["max_seq_len"] = 1024  # a pack needs a length; a short one takes little memory
        self._num_rows = _ROWS * len(self._dataset_nodes(self._data))

    @staticmethod
    def _dataset_nodes(data: dict[str, Any]) -> list[dict[str, Any]]:
        nodes = data["dataset"]
        if isinstance(nodes, list):
            return nodes
        return [nodes]

    def _limited(self, rows: int, packed: bool = False) -> dict[str, Any]:
        """Return the config with the first rows of each dataset that has splits."""
        data = deepcopy(self._data)
        for node in self._dataset_nodes(data):
            takes = _arguments(node)
            if "split" in takes and "[" not in str(node.get("split")) and not node.get("streaming"):
                node["split"] = f"{node.get('split', 'train')}[:{rows}]"
            if "packed" in takes:
                node["packed"] = packed
        return data

    def _train(
        self, name: str, *, is_compared: bool = False, packed: bool = False, **changes: Any
    ) -> dict[int, dict[str, float]]:
        """Run the recipe and return the metrics of each step.

        Args:
            name: name of the run's folder, config and log.
            is_compared: whether another run must have the same losses and gradients: it has plain SGD and no dropout.
            packed: whether rows are packed.
            **changes: settings of the run, if the recipe has them.

        Raises:
            CheckFailed: the run fails.
        """
        output = self._folder / name
        data = self._limited(_ROWS, packed)
        settings = {**_SHORT, **changes}
        if is_compared:
            settings = {**_SHORT, **_PLAIN, **changes}
            # Other micro-batches draw other dropout masks.
            _set_everywhere(data, ("lora_dropout", "dropout", "attn_dropout"), 0.0)
        for key, value in settings.items():
            if key in self._setting_names:
                data[key] = value
        data["output_dir"] = str(output)
        data["metric_logger"] = {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(output / "logs"),
            "output_fmt": "jsonl",
            "filename": "log.jsonl",
        }
        data["checkpointer"] = {**data["checkpointer"], "output_dir": str(output)}
        data["checkpointer"].pop("keep_last_n_checkpoints", None)  # resume() reads the checkpoint of half the steps
        config = output.with_suffix(".yaml")
        config.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        reason = call_in_child_process(run_recipe, self._recipe, config, output.with_suffix(".log"))
        if reason is not None:
            message = output.with_suffix(".log").read_text().rpartition("error: ")[2]
            raise CheckFailed(f"the run '{name}' ends with {reason}: {' '.join(message.split())[:400]}")
        # Only records of training steps have a loss.
        records = [json.loads(line) for line in (output / "logs" / "log.jsonl").read_text().splitlines()]
        return {record["step"]: record for record in records if "loss" in record}

    @cached_property
    def _steps_of_one_batch(self) -> dict[int, dict[str, float]]:
        """Metrics of two steps, each of all rows in one batch: what other runs are compared with."""
        return self._train("whole", is_compared=True, batch_size=self._num_rows)

    def _compare(self, metrics: dict[int, dict[str, float]], how: str) -> str:
        """Compare two steps of a run with those of one batch: losses, and the norm of the gradient."""
        expected = self._steps_of_one_batch
        if expected.keys() != metrics.keys() or len(expected) != 2:
            raise CheckFailed(f"{len(expected)} and {len(metrics)} steps instead of 2 with {how}: rows are left out")
        comparisons = []
        # The loss of step 2 is that after an update, in which errors of the first gradient add up.
        for step, name, tolerance in (
            (1, "loss", self._tolerance),
            (1, "grad_norm", 1e3 * self._tolerance),
            (2, "loss", 10 * self._tolerance),
        ):
            first = expected[step].get(name)
            second = metrics[step].get(name)
            if first is None or second is None:
                continue
            comparison = f"{name} {first:.6g} and {second:.6g}"
            comparisons.append(comparison)
            if not abs(first - second) <= tolerance * max(1e-3, abs(first)):  # also true for NaN
                raise CheckFailed(f"{comparison} for the same rows with {how}, in step {step}")
        return ", ".join(comparisons)

    def accumulation(self) -> str:
        """Check that one batch and gradient accumulation over single rows give the same steps."""
        if "gradient_accumulation_steps" not in self._setting_names:
            raise NotChecked("the recipe has no gradient_accumulation_steps")
        metrics = self._train("accumulated", is_compared=True, batch_size=1, gradient_accumulation_steps=self._num_rows)
        return self._compare(metrics, f"{self._num_rows} micro-batches")

    def packing(self) -> str:
        """Check that unpacked rows and packs give the same steps."""
        for node in self._dataset_nodes(self._data):
            if not {"packed", "split"} <= _arguments(node).keys():
                raise NotChecked("the dataset has no argument packed")
        metrics = self._train("packed", is_compared=True, packed=True, batch_size=self._num_rows)
        return self._compare(metrics, "packs")

    def resume(self) -> str:
        """Check that a run that is resumed half-way ends with the same bits."""
        if not {"save_every_n_steps", "resume_from_checkpoint"} <= self._setting_names:
            raise NotChecked("the recipe has no save_every_n_steps or resume_from_checkpoint")
        steps = {"batch_size": 1, "epochs": 1, "max_steps_per_epoch": _ROWS, "save_every_n_steps": _ROWS // 2}
        steps["shuffle"] = self._data.get("shuffle", True)  # the other checks turn it off; a resume must keep the order
        half = _ROWS // 2
        uninterrupted = self._train("uninterrupted", **steps)
        if len(uninterrupted) < _ROWS:
            raise NotChecked(f"{_ROWS} rows are needed, and the dataset has {len(uninterrupted)}")
        # A run resumes from the last checkpoint in its folder: give it the one at half of the steps alone.
        checkpoint = f"step_{half}"
        shutil.copytree(self._folder / "uninterrupted" / checkpoint, self._folder / "resumed" / checkpoint)
        resumed = self._train("resumed", **{**steps, "resume_from_checkpoint": True})
        expected_losses = {step: metrics["loss"] for step, metrics in uninterrupted.items() if step > half}
        if min(resumed) <= half:
            raise CheckFailed(
                f"with resume_from_checkpoint=True, the run began at step {min(resumed)} instead of {half + 1}"
            )
        resumed_losses = {step: metrics["loss"] for step, metrics in resumed.items()}
        if resumed_losses != expected_losses:
            raise CheckFailed(
                f"the losses are {list(resumed_losses.values())} instead of {list(expected_losses.values())}"
            )
        files = sorted((self._folder / "uninterrupted" / f"step_{_ROWS}").rglob("*.safetensors"))
        for file in files:
            copy = self._folder / "resumed" / file.relative_to(self._folder / "uninterrupted")
            if not copy.is_file() or file.read_bytes() != copy.read_bytes():
                raise CheckFailed(f"{file.relative_to(self._folder)} has other bits than in the resumed run")
        return f"steps {min(resumed)} to {max(resumed)} and {len(files)} files are the same, bit for bit"

    def load(self) -> str:
        """Check that a loaded checkpoint has the loss of the run's next step, and the same logits in transformers."""
        # The checkpoint of the first epoch, which is one step: the loss of step 2 is that of its weights.
        expected = self._steps_of_one_batch[2]["loss"]
        checkpoint = self._folder / "whole" / "epoch_0"
        if not any(checkpoint.glob("*config.json")):
            raise NotChecked("the checkpoint is a state dict, and the library cannot build the module it is of")
        trained = find_trained(str(checkpoint))
        # The loss of pairs needs another model, and prompts for generation have placeholder labels.
        rows = [row for row in self._examples(_ROWS) if "labels" in row and "number" not in row]
        loss = ""
        if rows:
            loss = f"{self._compare_loss(trained, rows, expected)}; "
        try:
            check = check_files(trained, "hf", None, trained.checkpoint, self._folder, "cpu")
        except EvaluationError as error:  # transformers lacks the architecture
            check = Check(reason=str(error))
        if not rows and check.measured is None:
            raise NotChecked(check.reason)
        return f"{loss}{check.verdict()}"

    def _compare_loss(self, trained: Trained, rows: list[dict[str, Any]], expected: float) -> str:
        """Compare the loss of a checkpoint, loaded alone, with the loss of the next step."""
        saved = trained.path
        if trained.has_weights:  # other libraries read the merged model rather than the base and the adapter
            saved = trained.checkpoint
        loss = self._loss_of(saved, rows)
        # Ten times the tolerance, as for every loss of step 2 (see _compare).
        if abs(loss - expected) <= 10 * self._tolerance * max(1.0, abs(expected)):
            return f"loss {loss:.6f}, as the run continues"
        # Before its first step, the run has the weights of checkpoint_dir: do the two losses agree on those?
        base = self._data["checkpointer"].get("checkpoint_dir")
        first_loss = self._steps_of_one_batch[1]["loss"]
        base_loss = first_loss
        if base is not None:
            base_loss = self._loss_of(base, rows)
        if abs(base_loss - first_loss) > 10 * self._tolerance * max(1.0, abs(first_loss)):
            return (
                "loss not compared, because the recipe does not train on the config's loss alone (compute_loss adds a "
                f"term): before the first step, with the weights of checkpoint_dir, it has {first_loss:.6f} where the "
                f"config's loss has {base_loss:.6f}"
            )
        raise CheckFailed(f"the saved model's loss is {loss:.6f}, and the run continues with {expected:.6f}")

    def _loss_of(self, folder: str | Path, rows: list[dict[str, Any]]) -> float:
        """Return the config's loss of rows, with the weights of a folder."""
        model, _ = torchtune.load(
            folder,
            dtype=self._data["dtype"],
            device=self._data.get("device"),
            images=getattr(self._tokenizer, "takes_images", False),
        )
        loss_fn = setup_loss(instantiate(self._data["loss"]), model)
        collate_name = self._data.get("collate_fn", "torchtune.data.collate_documents")
        collate = instantiate_collate(collate_name, self._tokenizer)
        batch = collate(rows).to(next(model.parameters()).device)
        with torch.no_grad():
            hidden = model(**batch.model_inputs(), output="hidden")
            total, count = loss_fn.sum_and_count(hidden, batch.labels, model.output)
        return float(total) / int(count)

    @cached_property
    def _tokenizer(self) -> Any:
        return instantiate(self._data["tokenizer"])

    def _dataset(self, rows: int) -> Any:
        return instantiate_dataset(self._limited(rows)["dataset"], self._tokenizer)

    def _examples(self, rows: int) -> list[dict[str, Any]]:
        """Return the rows that a run reads of so many rows of each dataset."""
        dataset = self._dataset(rows)
        count = min(len(dataset), rows * len(self._dataset_nodes(self._data)))
        return [dataset[index] for index in range(count)]

    def _may_be_truncated(self, tokens: Any) -> bool:
        """Return whether a row has the maximum length, to which it may have been truncated."""
        limit = getattr(self._tokenizer, "max_seq_len", None)
        return limit is not None and len(tokens) >= limit

    def labels(self) -> str:
        """Check that a training row is the generation prompt and the answer, and that only answers are labels."""
        dataset = self._dataset(_LABEL_ROWS)
        parts = dataset.row_datasets()
        conversations_of_parts = [part.conversations() for part in parts]
        if dataset.is_packed:
            raise NotChecked("the dataset packs its rows, which then are not those of single conversations")
        if None in conversations_of_parts:
            raise NotChecked("the dataset has no conversations")
        if not hasattr(self._tokenizer, "decode"):
            raise NotChecked("the tokenizer has no method decode")
        num_checked = 0
        # The header of an answer is the end of its prompt, which names the role. Some layouts train it, too.
        num_trained_header_tokens = 0
        # Some templates make several rows of a conversation, which then do not begin as it does.
        split_conversation = getattr(self._tokenizer, "conversations", lambda messages: [messages])
        for part, iterator in zip(parts, conversations_of_parts, strict=True):
            conversations = list(iterator)
            for index in range(len(part)):
                row = part[index]
                number = part.origins(index)[0]["row"]
                split = split_conversation(conversations[number])
                if len(split) == 1 and not self._may_be_truncated(row["tokens"]):
                    try:
                        num_trained = self._check_row(row, split[0])
                    except CheckFailed as error:
                        raise CheckFailed(f"row {number} of {part.source}: {error}") from None
                    num_trained_header_tokens = max(num_trained_header_tokens, num_trained)
                    num_checked += 1
        if not num_checked:
            raise NotChecked("all rows are cut to max_seq_len or split into turns")
        text = f"{num_checked} rows are prompt and answer"
        if num_trained_header_tokens:
            text += f"; the layout trains {num_trained_header_tokens} tokens of the header"
        return text

    def _check_row(self, row: dict[str, Any], messages: list[Any]) -> int:
        """Check the row of a conversation; return the number of trained tokens at the end of its prompt.

        First every message is trained or masked as it says. Then, if the last message is a trained answer, the row must
        begin with the prompt for it, of which only the header may be trained.
        """
        tokens = np.asarray(row["tokens"])  # [s]
        trained = is_trained(np.asarray(row["labels"]))  # [s]
        trained_text = self._tokenizer.decode(tokens[trained].tolist())
        masked_text = self._tokenizer.decode(tokens[~trained].tolist())
        for message in messages:
            # A template may remove the reasoning of earlier turns.
            text = message.text_content.rpartition("</think>")[2].strip()
            if message.role not in ("user", "assistant"):
                continue
            if message.masked and text not in masked_text:
                raise CheckFailed(f"'{text[:40]}' ({message.role}) is trained, wholly or in part")
            if not message.masked and text not in trained_text:
                raise CheckFailed(f"'{text[:40]}' ({message.role}) is not trained, wholly or in part")
        if messages[-1].role != "assistant" or messages[-1].masked:
            return 0
        prompt, _ = self._tokenizer.tokenize_messages(messages[:-1], add_end_tokens=False)
        if tokens[: len(prompt)].tolist() != list(prompt):
            raise CheckFailed("it does not begin with the prompt that generation has for its last answer")
        trains_question = len(messages) > 1 and not messages[-2].masked
        if trains_question:  # the config trains prompts, too
            return 0
        num_trained = len(prompt)  # trained tokens at the end of the prompt
        masked = np.flatnonzero(~trained[: len(prompt)])
        if len(masked):
            num_trained -= 1 + int(masked[-1])
        if num_trained > _MAX_HEADER_TOKENS:
            raise CheckFailed(f"the last {num_trained} tokens of the prompt are trained")
        return num_trained

    def end_of_turn(self) -> str:
        """Check that every trained passage ends with the end-of-turn token."""
        special = getattr(self._tokenizer, "special_tokens", {})
        # The end of a turn may be a special token that is not among the stop tokens.
        stops = {*getattr(self._tokenizer, "stop_tokens", ()), *special.values()}
        no_passages = "the rows have no labels, or the tokenizer has no stop_tokens"
        if not stops:
            raise NotChecked(no_passages)
        num_passages = 0
        for number, row in enumerate(self._examples(_LABEL_ROWS)):
            for _, tokens, labels in document_texts(row):
                trained = is_trained(labels)  # [s]
                # A passage ends at a trained token before one that is not trained, or at the end of the row.
                ends = np.flatnonzero(trained & ~np.append(trained[1:], False)).tolist()
                num_passages += len(ends)
                if self._may_be_truncated(tokens):
                    continue  # the cut may have removed the end of a passage
                for end in ends:
                    if int(tokens[end]) not in stops:
                        raise CheckFailed(f"example {number}: no stop token is trained at the end of a passage, {end}")
        if not num_passages:
            raise NotChecked(no_passages)
        return f"{num_passages} trained passages end with a stop token"


def run_recipe(recipe: RecipeTarget, config: Path, log: Path) -> str | None:
    """Run a recipe with all of its output in a file; return the reason if it fails."""
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            run_here(recipe, config, [])
        except SystemExit as stop:
            if stop.code:
                return f"exit code {stop.code}"
            return None
        except Exception as error:  # noqa: BLE001  (raised by a user's recipe)
            traceback.print_exc(file=file)
            return f"{type(error).__name__}: {error}"
    return None


def _arguments(node: Any) -> dict[str, Any]:
    """Return the parameters of a config node's component."""
    return dict(inspect.signature(locate(node["_component_"])).parameters)


def _set_everywhere(value: Any, names: tuple[str, ...], new: Any) -> None:
    """Set all existing keys in ``names``, at any depth."""
    if isinstance(value, dict):
        value.update({key: new for key in names if key in value})
        for inner in value.values():
            _set_everywhere(inner, names, new)
    elif isinstance(value, list):
        for inner in value:
            _set_everywhere(inner, names, new)
