"""Export a checkpoint: find it, write the files to a temporary folder, check them, and move them to the output folder.

The check: the library that reads the files computes the logits of the trained model.
"""

import argparse
import io
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import torchtune
from torchtune import config, evaluation
from torchtune._cli._processes import CrashedError, call_in_child_process
from torchtune._cli._reference_logits import (
    embed_elsewhere,
    missing_packages,
    read_elsewhere,
    score_elsewhere,
    tokenize_elsewhere,
)
from torchtune._cli.subcommand import find_checkpoint
from torchtune._facade import load_to_save
from torchtune.checkpoints import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    CheckpointError,
    CheckpointStore,
    GGUFFile,
    ModelSource,
    adapter_folder,
    quantize_checkpoint,
)
from torchtune.data import RERANKER_FILE, DataError
from torchtune.evaluation import Comparison, EvaluationError
from torchtune.models import from_hf_config, is_classifier, stored_dtype
from torchtune.modules.low_precision.quantizers import (
    Float8Quantizer,
    GGUFQuantizer,
    Int4WeightOnlyQuantizer,
    Int8DynActInt4WeightQuantizer,
    Int8WeightOnlyQuantizer,
    quantizable_layers,
)
from torchtune.reports import RunFolder, model_card
from torchtune.tokenizers import HuggingFaceModelTokenizer, go_template, hf_tokenizer
from torchtune.training import set_default_dtype
from torchtune.utils import (
    FolderLock,
    UserError,
    atomic_directory,
    clear_leftovers,
    get_logger,
    read_json,
    write_json,
)

# Record of an export and its check, in its folder.
RECORD = "torchtune_export.json"
# Files of an embedding model or a reranker, see extra_files of torchtune.rlhf.loss.
_EMBEDDING_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "2_Normalize/config.json",
    RERANKER_FILE,
)
# Ollama reserves memory for the whole context.
_MAX_CONTEXT = 8192
_PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Once upon a time there was a small dog who could not find",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    'What is 17 + 25? Let us think: 17 + 25 = 42. {"answer": 42, "unit": null}',
    "Ein Zug fährt um 8 Uhr in Köln ab und kommt um 12 Uhr in Berlin an.",
    "我们今天学习如何训练一个语言模型。",
    "SELECT name, COUNT(*) FROM orders WHERE year = 2024 GROUP BY name;",
    "Dear Sir or Madam,\n\nthank you for your letter of 3 May. I am sorry to",
)
_QUESTION = {"role": "user", "content": "What is 17 + 25?"}
_ANSWER = {"role": "assistant", "content": "It is 42.\n\nThat is 17 + 25."}
_SYSTEM = {"role": "system", "content": "You answer in one sentence."}
_SECOND_QUESTION = {"role": "user", "content": "  And in Köln, 我们?\n"}
# With and without a system prompt, of one and two turns, as a prompt and finished.
_CHATS = (
    [_QUESTION],
    [_SECOND_QUESTION],
    [_SYSTEM, _QUESTION],
    [_QUESTION, _ANSWER, _SECOND_QUESTION],
    [_QUESTION, _ANSWER],
    [_SECOND_QUESTION, _ANSWER],
    [_SYSTEM, _QUESTION, _ANSWER],
    [_QUESTION, _ANSWER, _SECOND_QUESTION, _ANSWER],
)
_MAX_TOKENS = 48
# A question and its answer, for rerankers.
_PAIRS = (("What is 17 + 25?", "It is 42."), ("Where do I park?", "Once upon a time there was a small dog."))
# Largest relative difference of an embedding or score: for equal weights, and for rounded weights.
_EMBEDDING_TOLERANCE = 2e-3
_ROUNDED_EMBEDDING_TOLERANCE = 0.2
# Required libraries besides transformers.
_LIBRARIES = {"adapter": ["peft"], "compressed-tensors": ["compressed_tensors"]}
# Largest relative difference of a layer's output, by the dtype of merged weights or the kind of quantization.
_LAYER_TOLERANCES = {
    torch.bfloat16: 4e-3,
    torch.float16: 1e-3,
    "bf16": 4e-3,
    "f16": 1e-3,
    "fp8": 0.06,
    "int8": 0.06,
    "q8_0": 0.06,
    "q5_1": 0.25,
    "q5_0": 0.25,
    "q4_1": 0.25,
    "q4_0": 0.25,
    "int4": 0.25,
    "8da4w": 0.25,
}
_EQUAL_LAYER_TOLERANCE = 1e-4
# Largest mean difference of logits, relative to their spread: for equal weights, and for rounded weights.
_LOGITS_TOLERANCE = 2e-3
_ROUNDED_LOGITS_TOLERANCE = 0.1
# Largest KL divergence of a quantized model from the trained model: a multiple of the KL divergence of the quantized
# base from the base, plus a margin.
_MAX_KL_RATIO = 3.0
_KL_MARGIN = 0.02
_MAX_NAMES = 5  # of tensors, in a message
_SECONDS_BETWEEN_LINES = 10.0  # between two lines of progress


@dataclass(frozen=True)
class Trained:
    """A checkpoint to export.

    Attributes:
        checkpoint: folder of the checkpoint.
        adapter: folder of the adapter, if an adapter was trained.
        base: folder of the model before training, if it still exists.
        run: the run that saved the checkpoint, if its settings still exist.
    """

    checkpoint: Path
    adapter: Path | None
    base: Path | None
    run: RunFolder | None

    @property
    def path(self) -> Path:
        """Folder from which :func:`torchtune.load` reads the trained model."""
        return self.adapter or self.checkpoint

    @property
    def has_weights(self) -> bool:
        """Whether the checkpoint has all weights, after LoRA with the adapter merged."""
        return self.adapter is None or any(self.checkpoint.glob("model*.safetensors"))


class FailedCheck(UserError):
    """Raised when the logits of exported files differ from the trained model's."""

    exit_code: ClassVar[int] = 3


@dataclass(frozen=True)
class Measured:
    """Comparison of a trained model with exported files.

    Attributes:
        library: name and version of the library that read the files.
        comparison: comparison of the logits.
        layers: largest relative difference of the outputs of each layer.
        unread: tensors that the library does not know, or that it does not find in the files.
    """

    library: str
    comparison: Comparison
    layers: dict[str, float]
    unread: list[str]

    def __str__(self) -> str:
        logits = self.comparison
        return (
            f"max |Δlogit| {logits.max_difference:.2g}, mean {logits.mean_difference:.2g}, "
            f"KL {logits.kl:.2g} per token, greedy tokens equal {logits.equal_tokens} of {logits.tokens}"
        )


@dataclass(frozen=True)
class Tokenized:
    """Comparison of the tokenizer that trained with the tokenizer files of an export.

    Attributes:
        trained: the tokenizer that trained, in words.
        texts: texts with other ids.
        chats: conversations with other ids, as texts.
        is_exact: whether conversations must have the same ids: the tokenizer used the chat template itself.
    """

    trained: str
    texts: list[str]
    chats: list[str]
    is_exact: bool

    def line(self) -> str:
        """Return the result in one sentence."""
        if not self.chats:
            return f"{len(_PROMPTS)} texts and {len(_CHATS)} conversations have the ids of {self.trained}"
        return (
            f"{len(self.chats)} of {len(_CHATS)} conversations have other ids than those of {self.trained}, which has "
            f"a chat layout of its own: serve the model with that layout. The first is {self.chats[0]!r}"
        )


@dataclass(frozen=True)
class Embedded:
    """Comparison of an embedding model, or a reranker, with its exported files.

    Attributes:
        kind: what was compared, ``embeddings`` or ``scores of pairs``.
        library: name and version of the library that read the files; empty if none could.
        difference: largest relative difference of an embedding or score.
        note: remark on the comparison.
    """

    kind: str
    library: str = ""
    difference: float = math.nan
    note: str = ""

    def line(self) -> str:
        """Return the result in one sentence."""
        if not self.library:
            return f"the {self.kind} are not compared: {self.note}"
        limit = f"relative difference from the trained model at most {self.difference:.2g}"
        text = f"{self.kind} in {self.library}: {limit}"
        if self.note:
            text += f"; {self.note}"
        return text


@dataclass(frozen=True)
class Check:
    """Result of a check.

    Attributes:
        measured: comparison of the trained model with the files; None if they were not checked.
        reason: reason for not checking.
        base: comparison of the base with the quantized base, if the weights are quantized.
        tokenized: comparison of the tokenizers; None if they were not compared.
        embedded: comparison of the embeddings or the scores of pairs; None for other models.
    """

    measured: Measured | None = None
    reason: str = ""
    base: Measured | None = None
    tokenized: Tokenized | None = None
    embedded: Embedded | None = None

    def verdict(self) -> str:
        """Return the result in one sentence."""
        if self.measured is None:
            return f"not checked because {self.reason}"
        return f"read by {self.measured.library}, with the logits of the trained model: {self.measured}"

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        if self.measured is None:
            return [self.verdict()]
        lines = [
            f"checked     in {self.measured.library}, {len(_PROMPTS)} prompts: {self.measured}",
            f"            relative difference of a layer at most {max(self.measured.layers.values()):.2g}",
        ]
        if self.tokenized is not None:
            lines.append(f"tokenizer   {self.tokenized.line()}")
        if self.embedded is not None:
            lines.append(f"compared    {self.embedded.line()}")
        if self.base is not None:
            lines.append(f"base        quantized alike: {self.base}")
        return lines

    def numbers(self) -> dict[str, Any]:
        """Return the result as JSON, without the layers."""
        numbers: dict[str, Any] = {"trained": None, "base": None}
        if self.measured is not None:
            numbers["trained"] = {"library": self.measured.library, **asdict(self.measured.comparison)}
        if self.base is not None:
            numbers["base"] = {"library": self.base.library, **asdict(self.base.comparison)}
        return numbers


def export(args: argparse.Namespace) -> None:
    """Export a checkpoint as the arguments of ``tune export`` define.

    Raises:
        UserError: the checkpoint does not fit the format, the check fails, the output folder is not empty and not an
            earlier export, or the disk is full. The output folder then stays unchanged.
    """
    trained = find_trained(args.model)
    if args.to in ("adapter", "merged") and trained.adapter is None:
        raise UserError(f"{trained.checkpoint} holds no adapter, all weights were trained: choose --to hf.")
    if args.to == "hf" and trained.adapter is not None:
        raise UserError(f"{trained.checkpoint} was trained as an adapter: choose --to merged, or --to adapter.")
    if args.to in ("gguf", "ollama") and is_classifier(trained.checkpoint):
        raise UserError(
            f"{trained.checkpoint} is a classifier or a reward model, and GGUF files are written of language models: "
            "choose --to hf."
        )
    label = args.to
    if args.quant is not None:
        label += f"-{args.quant}"
    if args.output is None:
        checkpoint = trained.checkpoint.resolve()
        output = checkpoint.with_name(f"{checkpoint.name}-{label}")
    else:
        output = args.output.expanduser()
    is_export = (output / RECORD).is_file()  # of an earlier command, and is replaced
    is_empty = output.is_dir() and not any(output.iterdir())
    if output.exists() and not is_export and not is_empty:
        raise UserError(f"--output: {output} is there already and is no export: name a new folder.")
    with FolderLock(output.parent, name=f".{output.name}.lock", key="--output").held():
        clear_leftovers(output)  # of a killed export: under the lock, no other export is running
        check = _write(trained, args, output)
    sizes = [path.stat().st_size for path in output.rglob("*") if path.is_file()]
    written = f"wrote       {output} ({len(sizes):,} files, {sum(sizes):,} bytes)"
    print("\n".join([*check.lines(), written, *_commands(args.to, output)]))
    if args.push:
        _push(output, args.push, upload=args.yes)


def _write(trained: Trained, args: argparse.Namespace, output: Path) -> Check:
    """Write the files to a temporary folder, check them, and move them to the output folder."""
    with atomic_directory(output) as temporary:
        export_folder = temporary / "files"  # apart from the merged weights and the quantized base
        say("writing", f"the files of {output}")
        write_files(trained, args.to, args.quant, export_folder, temporary / "merged")
        check = _check(trained, args, export_folder, temporary / "base")
        shutil.rmtree(temporary / "base", ignore_errors=True)  # absent unless the check has quantized the base
        record = {
            "checkpoint": str(trained.checkpoint),
            "to": args.to,
            "quant": args.quant,
            "check": check.numbers(),
        }
        write_json(export_folder / RECORD, record)  # by which a later export knows that it may replace the folder
        if trained.run is not None:  # otherwise, keep the README of the checkpoint
            library = "peft" if args.to == "adapter" else "transformers"
            card = model_card(trained.run, check=check.verdict(), library=library)
            (export_folder / "README.md").write_text(card, encoding="utf-8")
        # The temporary folder becomes the output folder, so the files move up into it.
        for path in list(export_folder.iterdir()):
            path.rename(temporary / path.name)
        export_folder.rmdir()
    return check


def _check(trained: Trained, args: argparse.Namespace, export_folder: Path, aside: Path) -> Check:
    """Check the files, unless ``--no-check`` is set; ``--check`` requires it."""
    if args.check is False:
        return Check(reason="of --no-check")
    try:
        check = check_files(trained, args.to, args.quant, export_folder, aside, args.device)
    except EvaluationError as error:
        # The temporary folder is removed with the files, so its path says nothing.
        reason = str(error).replace(str(export_folder), "the written files").rstrip(".")
        raise FailedCheck(f"{reason}; --no-check writes them without this check.") from error
    if args.check and check.measured is None:
        raise UserError(f"--check: the files cannot be checked, because {check.reason}.")
    return check


def _commands(to: str, output: Path) -> list[str]:
    """Return the commands that serve an export."""
    folder = shlex.quote(str(output.resolve()))
    name = shlex.quote(output.resolve().name)
    if to == "adapter":
        settings = read_json(output / ADAPTER_CONFIG_FILE)
        largest_rank = max([settings["r"], *settings.get("rank_pattern", {}).values()])
        max_lora_rank = max(8, 2 ** (largest_rank - 1).bit_length())  # vLLM requires powers of two
        base = shlex.quote(str(settings["base_model_name_or_path"]))
        options = f"--enable-lora --max-lora-rank {max_lora_rank} --lora-modules {name}={folder}"
        return [f"serve       vllm serve {base} {options}"]
    if to == "ollama":
        return [f"serve       ollama create {name} -f {folder}/Modelfile && ollama run {name}"]
    if to == "gguf":
        return [f"serve       llama-server -m {folder}/{next(output.glob('*.gguf')).name}"]
    return [f"serve       vllm serve {folder}", f"            transformers serve {folder}"]


def _push(folder: Path, repo_id: str, *, upload: bool) -> None:
    """Upload an export to the hub; without ``upload``, only print what would be."""
    from torchtune import _hub

    # Without hidden files, such as those of a file manager, which _hub.upload leaves out as well.
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    for path in files:
        print(f"{'push':<12}{path.relative_to(folder)} ({path.stat().st_size:,} bytes)")
    if not upload:
        print(f"{'':<12}nothing is uploaded: add --yes to upload {len(files)} files to {repo_id}")
        return
    print(f"{'':<12}{_hub.upload(folder, repo_id)}")


def find_trained(model: str) -> Trained:
    """Find the checkpoint, its adapter and its base.

    A base that is no folder here gives None: it was deleted, or is the name of a repository.

    Raises:
        UserError: there is no checkpoint, or the run is still in progress.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UserError(f"{model}: there is no such folder: give that of a run or of a checkpoint.")
    checkpoint = Path(find_checkpoint(str(folder)))
    if checkpoint != folder:  # a run in progress may delete its checkpoints
        FolderLock(folder, key="run").check_unused()
    run = None
    base = None
    with suppress(UserError):  # a checkpoint alone, without the settings of its run
        run = RunFolder(checkpoint.resolve())
        base = run.base
    adapter = None
    with suppress(CheckpointError):  # all weights were trained
        adapter = adapter_folder(checkpoint)
    if adapter is not None and (adapter / ADAPTER_CONFIG_FILE).is_file():
        # The base that the adapter names; a missing name is no folder, as the name of a repository is none.
        base = Path(str(read_json(adapter / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")))
    if base is not None and not os.path.isdir(base):
        base = None
    return Trained(checkpoint, adapter, base, run)


def write_files(trained: Trained, to: str, quant: str | None, export_folder: Path, merged: Path) -> None:
    """Write an export.

    Args:
        trained: the checkpoint.
        to: format.
        quant: kind of quantization; None for formats without one.
        export_folder: folder to write.
        merged: folder for merged weights that are deleted after quantization.
    """
    if to in ("hf", "adapter", "merged"):
        dtype = None  # that of the checkpoint
        if to == "adapter" and (trained.path / ADAPTER_FILE).is_file():  # its dtype may differ from the base's
            tensors = ModelSource(trained.path, [ADAPTER_FILE]).open()
            dtype = tensors.read(tensors.names()[0]).dtype
        model = load_to_save(trained.path, dtype)
        contents = "model" if to == "hf" else to
        torchtune.save(model, export_folder, contents=contents)
        # What sentence-transformers reads of an embedding model or reranker, and the base model's folder may lack.
        if (trained.checkpoint / "modules.json").is_file():
            for name in _EMBEDDING_FILES:
                if (trained.checkpoint / name).is_file():
                    (export_folder / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(trained.checkpoint / name, export_folder / name)
        return
    source = trained.checkpoint
    if not trained.has_weights:  # the adapter alone was saved
        write_files(trained, "merged", None, merged, merged)
        source = merged
    model = quantize(source, quant, export_folder)
    shutil.rmtree(merged, ignore_errors=True)
    if to == "ollama":
        _write_modelfile(export_folder, model.description.max_seq_len)


def quantize(folder: Path, quant: str, export_folder: Path) -> torch.nn.Module:
    """Quantize the weights in a folder; return their model, on the meta device."""
    with torch.device("meta"):
        model = from_hf_config(folder)
    quantize_checkpoint(ModelSource(folder), model, _quantizer(quant, model), export_folder)
    return model


def _write_modelfile(export_folder: Path, context: int) -> None:
    """Write Ollama's ``Modelfile`` beside the GGUF file: chat template, stop texts, and at most ``context`` tokens."""
    file = next(export_folder.glob("*.gguf"))
    tokenizer = hf_tokenizer(str(export_folder))
    # Ollama adds BOS by itself if the file says so; the template must not add another.
    adds_bos = bool(GGUFFile(file).get("tokenizer.ggml.add_bos_token"))
    lines = [
        f"FROM ./{file.name}",
        f'TEMPLATE """{go_template(tokenizer, adds_bos=adds_bos)}"""',
    ]
    for text, token_id in tokenizer.special_tokens.items():
        if token_id in tokenizer.stop_tokens:
            lines.append(f'PARAMETER stop "{text}"')
    lines.append(f"PARAMETER num_ctx {min(context, _MAX_CONTEXT)}")
    (export_folder / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _quantizer(quant: str, model: torch.nn.Module) -> Any:
    """Return the quantizer of a kind of quantization, with a group size that fits all layers of the model."""
    if quant == "int8":
        return Int8WeightOnlyQuantizer()
    if quant == "fp8":
        return Float8Quantizer()
    if quant not in ("int4", "8da4w"):
        return GGUFQuantizer(quant.upper())
    widths = [layer.in_features for layer in quantizable_layers(model).values()]
    groupsize = 128  # if none fits, the quantizer names the layer that does not
    for size in (128, 64, 32):
        if all(width % size == 0 for width in widths):
            groupsize = size
            break
    if quant == "int4":
        return Int4WeightOnlyQuantizer(groupsize=groupsize)
    return Int8DynActInt4WeightQuantizer(groupsize=groupsize)


def check_files(trained: Trained, to: str, quant: str | None, export_folder: Path, aside: Path, device: str) -> Check:
    """Compare files with the trained model.

    Args:
        trained: the checkpoint.
        to: format of the files.
        quant: kind of quantization of the files.
        export_folder: folder of the files.
        aside: folder for a quantized base.
        device: device of the models.

    Raises:
        FailedCheck: the files have other logits or another tokenizer; the message names tensors or a row.
        EvaluationError: the library cannot read the files.
    """
    missing = missing_packages("transformers", *_LIBRARIES.get(to, ()))
    if missing:
        return Check(reason=f"{', '.join(missing)} is not installed: pip install 'torchtune[check]'")
    # Each comparison runs in a process of its own: other libraries crash, and their memory is then free for the next.
    base = None
    tokenized = None
    try:
        measured = call_in_child_process(_measure, trained.path, to, export_folder, device)
        # llama.cpp reads the tokenizer in the GGUF file, and not the tokenizer's files beside it.
        if _reader(to) != "llama_cpp" and (export_folder / "tokenizer.json").is_file():
            settings = None
            if trained.run is not None:
                settings = trained.run.settings.get("tokenizer")
            tokenized = call_in_child_process(_compare_tokenizers, settings, trained.path, export_folder)
        embedded = None
        if to in ("hf", "merged") and (export_folder / "modules.json").is_file():
            embedded = call_in_child_process(_compare_embeddings, trained.path, export_folder, device)
        if quant is not None and trained.base is not None:
            try:
                quantize(trained.base, quant, aside)
                base = call_in_child_process(_measure, trained.base, to, aside, device)
            except UserError as error:  # for example, of another layout
                get_logger().warning(f"The quantized base is not compared with the base: {error}")
    except CrashedError as error:
        return Check(reason=f"{_reader(to)} cannot be asked: {error}")
    # A merged weight is rounded to its dtype, a quantized one to its kind; other weights have the same bits.
    rounding = quant
    if to == "merged":
        rounding = stored_dtype(export_folder)
    check = Check(measured, base=base, tokenized=tokenized, embedded=embedded)
    _require_agreement(check, rounding, is_quantized=quant is not None)
    return check


def _require_agreement(check: Check, rounding: Any, *, is_quantized: bool) -> None:
    """Raise :class:`FailedCheck` if an export computes something else than the trained model.

    Args:
        check: comparisons of the two.
        rounding: dtype or kind of quantization to which weights were rounded, a key of ``_LAYER_TOLERANCES``; any other
            value if they were not.
        is_quantized: whether the weights are quantized, so that the logits differ as those of the base do.
    """
    measured = check.measured
    layer_limit = _LAYER_TOLERANCES.get(rounding, _EQUAL_LAYER_TOLERANCE)
    are_rounded = layer_limit != _EQUAL_LAYER_TOLERANCE
    # "not <=", because a difference may be NaN
    differing = [name for name, difference in measured.layers.items() if not difference <= layer_limit]
    if is_quantized:
        kl_limit = torch.inf  # without the base, nothing tells how much KL divergence this quantization causes
        if check.base is not None:  # a multiple of the KL divergence of the quantized base, plus a margin
            kl_limit = _MAX_KL_RATIO * check.base.comparison.kl + _KL_MARGIN
        agrees = measured.comparison.kl <= kl_limit
    else:
        relative_limit = _ROUNDED_LOGITS_TOLERANCE if are_rounded else _LOGITS_TOLERANCE
        agrees = measured.comparison.mean_difference <= relative_limit * measured.comparison.spread
    if differing or not agrees:
        raise FailedCheck(_explain_difference(measured, check.base, differing))
    tokenized = check.tokenized
    # Conversations have other ids than the chat template's where the tokenizer that trained has a layout of its own.
    if tokenized is not None and (tokenized.texts or (tokenized.chats and tokenized.is_exact)):
        first = [*tokenized.texts, *tokenized.chats][0]
        raise FailedCheck(
            f"The tokenizer files of the export give other ids than {tokenized.trained}, for example for {first!r}: "
            "save the checkpoint again with the tokenizer that trained."
        )
    embedded = check.embedded
    if embedded is not None and embedded.library:  # empty if no library could compute them
        difference_limit = _ROUNDED_EMBEDDING_TOLERANCE if are_rounded else _EMBEDDING_TOLERANCE
        if not embedded.difference <= difference_limit:
            raise FailedCheck(
                f"{embedded.library} computes other {embedded.kind} than the trained model, with a relative difference "
                f"of {embedded.difference:.2g}: texts must begin and end as the tokenizer's files say."
            )


def _explain_difference(measured: Measured, base: Measured | None, differing: list[str]) -> str:
    """Return the message of a failed check.

    Args:
        measured: comparison of the trained model with the files.
        base: comparison of the base with the quantized base, if there is one.
        differing: layers whose outputs differ too much.
    """
    names = list(dict.fromkeys([*measured.unread, *differing]))  # each once, in this order
    if names:
        tensors = f"these tensors differ: {', '.join(names[:_MAX_NAMES])}"
        if len(names) > _MAX_NAMES:
            tensors += f" and {len(names) - _MAX_NAMES} more"
    else:
        tensors = "this library reads every tensor"
    figures = str(measured)
    if base is not None:
        figures += f"; the quantized base: {base}"
    return f"{measured.library} has other logits than the trained model ({figures}): {tensors}."


def _measure(path: Path, to: str, export_folder: Path, device: str) -> Measured:
    """Compare a model with files: by logits in the library that reads them, and by layers in this library."""
    say("checking", f"the logits of {path}, {len(_PROMPTS)} prompts")
    # Both in float32: the rounding of another dtype would hide small differences of the weights.
    model, tokenizer = torchtune.load(path, dtype="fp32", device=device)
    prompts = [torch.tensor(tokenizer.encode(text, add_eos=False)[:_MAX_TOKENS]) for text in _PROMPTS]
    logits = evaluation.logits_of(model, prompts)
    model_device = next(model.parameters()).device
    try:
        exported_model = _load_export(path, to, export_folder, model_device)
        layers = evaluation.compare_layers(model, exported_model, _PrintedAtTimes())
        del exported_model  # before the other library loads the files
    except UserError as error:  # the check fails with this reason
        layers = {str(error).rstrip("."): torch.inf}
    del model  # the other library needs the memory
    say("checking", f"the logits of the files in {_reader(to)}")
    with redirect_stderr(io.StringIO()):  # warnings and progress bars
        library, exported_logits, unread = read_elsewhere(_reader(to), export_folder, prompts, model_device)
    return Measured(library, evaluation.compare_models(logits, exported_logits), layers, unread)


def _compare_tokenizers(settings: Mapping[str, Any] | None, path: Path, export_folder: Path) -> Tokenized:
    """Compare the ids of texts and conversations; see :class:`Tokenized`.

    Args:
        settings: settings of the tokenizer that trained, if they are known.
        path: folder of the trained model, whose tokenizer is compared if the other one cannot be built.
        export_folder: folder of the export.
    """
    settings = dict(settings or {})
    if "max_seq_len" in settings:
        settings["max_seq_len"] = None  # the texts are compared to their ends
    try:
        tokenizer = config.instantiate(settings)
    except UserError:  # no settings are known, or the files of the tokenizer are gone
        tokenizer = None
    if tokenizer is None:
        tokenizer = hf_tokenizer(str(path))
        trained = "the checkpoint's tokenizer"
    else:
        trained = "the tokenizer that trained"
    is_exact = isinstance(tokenizer, HuggingFaceModelTokenizer)
    texts = list(_PROMPTS)
    if is_exact:  # other tokenizers encode special tokens in a text as plain text
        texts += [f"one {token} two" for token in tokenizer.special_tokens]
    variables = settings.get("chat_template_kwargs") or {}
    ids_of_texts, ids_of_chats = tokenize_elsewhere(export_folder, texts, _CHATS, variables)
    differing_texts = []
    for text, exported_ids in zip(texts, ids_of_texts, strict=True):
        if tokenizer.encode(text, add_bos=False, add_eos=False) != exported_ids:
            differing_texts.append(text)
    differing_chats = []
    for chat, exported_ids in zip(_CHATS, ids_of_chats, strict=True):
        is_prompt = chat[-1]["role"] == "user"
        try:
            trained_ids, _ = tokenizer.tokenize_messages(chat, add_end_tokens=not is_prompt)
        except DataError:  # agrees with files that refuse this conversation, too
            trained_ids = None
        # Where the template does not end the last turn, training adds the EOS token.
        are_both_finished = not is_prompt and exported_ids is not None and trained_ids is not None
        if are_both_finished and trained_ids[len(exported_ids) :] == [tokenizer.eos_id]:
            trained_ids = trained_ids[:-1]
        if trained_ids != exported_ids:
            differing_chats.append(" / ".join(turn["content"] for turn in chat))
    return Tokenized(trained, differing_texts, differing_chats, is_exact)


def _compare_embeddings(path: Path, export_folder: Path, device: str) -> Embedded:
    """Compare the embeddings of texts, or the scores of a reranker; see :class:`Embedded`.

    Args:
        path: folder of the trained model.
        export_folder: folder of the export, with the settings of the training.
        device: device of the models.
    """
    is_missing = bool(missing_packages("sentence_transformers"))
    remedy = "sentence-transformers is not installed: pip install 'torchtune[embeddings]'"
    model, tokenizer = torchtune.load(path, dtype="fp32", device=device)
    model_device = next(model.parameters()).device
    if (export_folder / RERANKER_FILE).is_file():
        kind = "scores of pairs"
        if is_missing:
            return Embedded(kind, note=remedy)
        trained_scores = evaluation.Reranker.of(export_folder, model, tokenizer).scores(_PAIRS)
        library, scores = score_elsewhere(export_folder, _PAIRS, model_device)
        difference = (scores - trained_scores).abs().max() / trained_scores.abs().max()
        return Embedded(kind, library, difference.item())
    settings = evaluation.EmbeddingSettings.of(export_folder)
    instruction = settings.query_instruction
    vectors = evaluation.embed(
        model, tokenizer, _PROMPTS, pooling=settings.pooling, instruction=instruction, add_eos=settings.add_eos
    )
    reader = "transformers" if is_missing else "sentence_transformers"
    library, exported = embed_elsewhere(reader, export_folder, _PROMPTS, instruction, settings.pooling, model_device)
    note = f"pooled here, because {remedy}" if is_missing else ""
    difference = (vectors - exported).norm(dim=1).max().item()  # of vectors of length 1
    return Embedded("embeddings", library, difference, note)


def say(label: str, text: str) -> None:
    """Print what an export does: with a large model, each part takes minutes."""
    print(f"{label:<12}{text}", file=sys.stderr, flush=True)


class _PrintedAtTimes:
    """Prints how many weights are compared, at first and then after ten seconds or more."""

    def __init__(self) -> None:
        self._last = -math.inf

    def __call__(self, number: int, total: int) -> None:
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            say("checking", f"weight {number} of {total}")
            self._last = time.monotonic()


def _reader(to: str) -> str:
    """Return the library that reads a format."""
    if to in ("gguf", "ollama") and not missing_packages("llama_cpp"):
        return "llama_cpp"
    if to == "adapter":
        return "peft"
    return "transformers"  # GGUF files, too


def _load_export(path: Path, to: str, export_folder: Path, device: torch.device) -> torch.nn.Module:
    """Read the files in this library; GGUF files are dequantized by the ``gguf`` package."""
    if to not in ("gguf", "ollama"):
        model, _ = torchtune.load(export_folder, dtype="fp32", device=device)
        return model
    folder = path
    if not (path / "config.json").is_file():  # an adapter, whose checkpoint around it has one
        folder = path.parent
    with set_default_dtype(torch.float32), torch.device("meta"):
        model = from_hf_config(folder)
    CheckpointStore({"policy": ModelSource(export_folder)}).load_model(model, device=device, whole=True)
    return model.eval()
