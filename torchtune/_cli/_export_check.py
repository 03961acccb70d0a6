"""Check of an export: the library that reads the files has the logits of the trained model."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

import torchtune
from torchtune import evaluation
from torchtune._cli._export_files import Trained, quantize
from torchtune.checkpoints import CheckpointStore, ModelSource
from torchtune.evaluation import Comparison, ReadModel
from torchtune.models import from_hf_config, stored_dtype
from torchtune.training import set_default_dtype
from torchtune.utils import UserError, get_device, get_logger

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
_MOST_TOKENS = 48
# Besides transformers.
_LIBRARIES = {"adapter": ["peft"], "compressed-tensors": ["compressed_tensors"]}
# Largest relative difference of a layer's output, by the dtype of merged weights or the kind of quantization.
_OF_LAYER = {torch.bfloat16: 4e-3, torch.float16: 1e-3, "bf16": 4e-3, "f16": 1e-3, "q8_0": 0.06, "int8": 0.06}
_OF_LAYER |= {"fp8": 0.06, **dict.fromkeys(("q5_1", "q5_0", "q4_1", "q4_0", "int4", "8da4w"), 0.25)}
_OF_EQUAL_LAYER = 1e-4
# Largest mean difference of logits, relative to their spread: of equal weights, and of rounded ones.
_OF_LOGITS, _OF_ROUNDED_LOGITS = 2e-3, 0.1
# KL of a quantized model from the trained one: this many times that of the quantized base from the base, and more.
_TIMES_BASE, _KL_MARGIN = 3.0, 0.02
_NAMED = 5


class FailedCheck(UserError):
    """Error of exported files whose logits are not those of the trained model."""

    exit_code: ClassVar[int] = 3


@dataclass(frozen=True)
class Check:
    """Result of a check.

    Attributes:
        comparison: the trained model with the files; None if they were not checked.
        library: the libraries that read them, or the reason for not checking.
        layer: largest relative difference of a layer.
        base: the same of the quantized base with the base, if the weights are quantized.
    """

    comparison: Comparison | None
    library: str
    layer: float = 0.0
    base: Comparison | None = None

    def verdict(self) -> str:
        """Return the result in one sentence."""
        if self.comparison is None:
            return f"not checked {self.library}"
        return f"read by {self.library}, with the logits of the trained model: {_words(self.comparison)}"

    def lines(self) -> list[str]:
        """Return the result in words."""
        if self.comparison is None:
            return [f"not checked {self.library}"]
        found = [f"checked     in {self.library}, {len(_PROMPTS)} prompts: {_words(self.comparison)}"]
        found.append(f"            relative difference of a layer at most {self.layer:.2g}")
        return found + ([] if self.base is None else [f"base        quantized alike: {_words(self.base)}"])


def check_export(trained: Trained, args: argparse.Namespace, files: Path, aside: Path) -> Check:
    """Compare exported files with the trained model.

    Args:
        trained: the checkpoint.
        args: arguments of ``tune export``.
        files: folder of the files.
        aside: folder for a quantized base.

    Raises:
        FailedCheck: the files give other logits; the message names tensors.
        UserError: a library is missing, and ``--check`` requires it.
    """
    if args.check is False:
        return Check(None, "because of --no-check")
    if missing := evaluation.missing_packages("transformers", *_LIBRARIES.get(args.to, ())):
        reason = f"because {', '.join(missing)} is not installed: pip install 'torchtune[check]'"
        if args.check:
            raise UserError(f"--check: the files cannot be checked, {reason}.")
        return Check(None, reason)
    to, quant, device, base = args.to, args.quant, get_device(args.device), None
    comparison, layers, read = _measure(trained.path, to, files, device)
    if quant is not None and trained.base is not None:
        try:
            quantize(trained.base, quant, aside)
            base = _measure(trained.base, to, aside, device)[0]
        except UserError as error:  # of another layout, for example
            get_logger().warning(f"The quantized base is not compared with the base: {error}")
    limit = _OF_LAYER.get(stored_dtype(files) if to == "merged" else quant, _OF_EQUAL_LAYER)
    wrong = [name for name, error in layers.items() if not error <= limit]
    if quant is None:
        most = (_OF_LOGITS if limit == _OF_EQUAL_LAYER else _OF_ROUNDED_LOGITS) * comparison.spread
        agrees = comparison.mean_difference <= most
    else:
        agrees = comparison.kl <= (torch.inf if base is None else _TIMES_BASE * base.kl + _KL_MARGIN)
    if wrong or not agrees:
        raise FailedCheck(_sentence(read, comparison, base, wrong))
    return Check(comparison, read.library, max(layers.values()), base)


def _sentence(read: ReadModel, comparison: Comparison, base: Comparison | None, wrong: list[str]) -> str:
    names = list(dict.fromkeys([*read.unread, *wrong]))
    more = f" and {len(names) - _NAMED} more" if names[_NAMED:] else ""
    what = f"these tensors differ: {', '.join(names[:_NAMED])}{more}" if names else "this library reads every tensor"
    than = "" if base is None else f"; the quantized base: {_words(base)}"
    return f"{read.library} has other logits than the trained model ({_words(comparison)}{than}): {what}."


def _words(found: Comparison) -> str:
    return (
        f"max |Δlogit| {found.max_difference:.2g}, mean {found.mean_difference:.2g}, KL {found.kl:.2g} per token, "
        f"greedy tokens equal {found.equal_tokens} of {found.tokens}"
    )


def _measure(path: Path, to: str, files: Path, device: torch.device) -> tuple[Comparison, dict[str, float], ReadModel]:
    """Compare a model with files: by logits in the library that reads them, and by layers in this one."""
    model, tokenizer = torchtune.load(path, dtype="fp32", device=device)
    prompts = [torch.tensor(tokenizer.encode(text, add_eos=False)[:_MOST_TOKENS]) for text in _PROMPTS]
    logits = evaluation.record_logits(evaluation.logits_of(model), prompts)
    try:
        layers = evaluation.compare_layers(model, _read_again(path, to, files, device))
    except UserError as error:
        layers = {str(error).rstrip("."): torch.inf}
    del model
    try:
        read = _read(to, files, device)
        return evaluation.compare_models(logits, read.logits, prompts), layers, read
    except evaluation.EvaluationError as error:
        raise FailedCheck(str(error)) from error


def _read(to: str, files: Path, device: torch.device) -> ReadModel:
    if to == "adapter":
        return evaluation.read_with_peft(files, device)
    if to not in ("gguf", "ollama"):
        return evaluation.read_with_transformers(files, device)
    file = next(files.glob("*.gguf"))
    if not evaluation.missing_packages("llama_cpp"):
        return evaluation.read_with_llama_cpp(file)
    return evaluation.read_with_transformers(files, device, gguf_file=file.name)


def _read_again(path: Path, to: str, files: Path, device: torch.device) -> torch.nn.Module:
    """Read the files in this library; of GGUF, with the dequantization of the package ``gguf``."""
    if to not in ("gguf", "ollama"):
        return torchtune.load(files, dtype="fp32", device=device)[0]
    source = ModelSource(files)
    with set_default_dtype(torch.float32), torch.device("meta"):
        model = from_hf_config(next(place for place in (path, path.parent) if (place / "config.json").is_file()))
    CheckpointStore({"policy": source}).load_model(model, device=device, whole=True)
    return model.eval()
