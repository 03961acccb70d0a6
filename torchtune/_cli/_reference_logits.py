"""Read exported files with the libraries for which they are written: transformers, peft and llama.cpp.

These libraries are optional.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.evaluation import EvaluationError
from torchtune.utils import first_line, hide_import_warnings, require


def missing_packages(*names: str) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in names if find_spec(name) is None]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Context manager for another library, whose warnings say nothing about the files."""
    with warnings.catch_warnings(), hide_import_warnings("torchao"):
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def read_elsewhere(
    library: str, export_folder: Path, prompts: Sequence[Tensor], device: torch.device
) -> tuple[str, list[Tensor], list[str]]:
    """Load exported files in float32 in another library, and compute the logits of prompts.

    Args:
        library: ``transformers``, ``peft`` (an adapter on the base that it names) or ``llama_cpp`` (on the host).
        export_folder: folder of the files.
        prompts: token ids, each int64 ``[s]``.
        device: device of the model.

    Returns:
        Name and version of the library, logits of each prompt ``[s, v]``, and the names of tensors that are unknown to
        the library or are missing.

    Raises:
        EvaluationError: the library raises an error.
        UserError: the library is not installed.
    """
    with hide_import_warnings("torchao"):
        module = require(library, extra="check", purpose="The check of an export")
    try:
        with _without_warnings():
            model, unread = _READERS[library](module, export_folder)
            logits = [prompt_logits.float().cpu() for prompt_logits in _compute(model, prompts, device)]
    except Exception as error:  # raised by the other library
        raise EvaluationError(f"{library} cannot read {export_folder}: {first_line(error)}.") from error
    return f"{library} {module.__version__}", logits, unread


@torch.no_grad()
def embed_elsewhere(
    library: str, export_folder: Path, texts: Sequence[str], instruction: str, pooling: str, device: torch.device
) -> tuple[str, Tensor]:
    """Load an exported embedding model in float32 in another library, and embed texts.

    Args:
        library: ``sentence_transformers``, which reads pooling itself, or ``transformers``, whose hidden states are
            pooled here.
        export_folder: folder of the files.
        texts: ``n`` texts.
        instruction: text before each of them.
        pooling: ``last`` or ``mean``.
        device: device of the model.

    Returns:
        Name and version of the library, and vectors of length 1, float32 ``[n, d]``.

    Raises:
        EvaluationError: the library raises an error.
        UserError: the library is not installed.
    """
    extra = "embeddings" if library == "sentence_transformers" else "check"
    module = require(library, extra=extra, purpose="The check of an embedding model")
    try:
        with _without_warnings():
            if library == "sentence_transformers":
                model = module.SentenceTransformer(
                    str(export_folder), device=str(device), model_kwargs={"dtype": torch.float32}
                )
                vectors = model.encode(list(texts), prompt=instruction, convert_to_tensor=True, show_progress_bar=False)
            else:
                tokenizer = module.AutoTokenizer.from_pretrained(export_folder)
                model = module.AutoModel.from_pretrained(export_folder, dtype=torch.float32).eval().to(device)
                vectors = torch.stack([_pooled(model, tokenizer, instruction + text, pooling) for text in texts])
    except Exception as error:  # raised by the other library
        raise EvaluationError(f"{library} cannot embed with {export_folder}: {first_line(error)}.") from error
    return f"{library} {module.__version__}", nn.functional.normalize(vectors.float().cpu(), dim=-1)


def _pooled(model: nn.Module, tokenizer: Any, text: str, pooling: str) -> Tensor:
    """Return the last hidden state of a text, or the mean of all ``[d]``."""
    ids = torch.tensor([tokenizer(text)["input_ids"]], device=model.device)
    hidden = model(ids).last_hidden_state[0]  # [s, d]
    if pooling == "last":
        return hidden[-1]
    return hidden.mean(0)


@torch.no_grad()
def score_elsewhere(export_folder: Path, pairs: Sequence[tuple[str, str]], device: torch.device) -> tuple[str, Tensor]:
    """Load an exported reranker in float32 in ``sentence-transformers``, and score pairs of a query and a document.

    Args:
        export_folder: folder of the files.
        pairs: ``n`` pairs.
        device: device of the model.

    Returns:
        Name and version of the library, and scores, float32 ``[n]``.

    Raises:
        EvaluationError: the library raises an error.
        UserError: the library is not installed.
    """
    module = require("sentence_transformers", extra="embeddings", purpose="The check of a reranker")
    try:
        with _without_warnings():
            model = module.CrossEncoder(str(export_folder), device=str(device), model_kwargs={"dtype": torch.float32})
            scores = model.predict(list(pairs), convert_to_tensor=True, show_progress_bar=False)
    except Exception as error:  # raised by the other library
        raise EvaluationError(
            f"sentence_transformers cannot score with {export_folder}: {first_line(error)}."
        ) from error
    return f"sentence_transformers {module.__version__}", scores.float().cpu()


def tokenize_elsewhere(
    export_folder: Path,
    texts: Sequence[str],
    chats: Sequence[Sequence[Mapping[str, Any]]],
    variables: Mapping[str, Any],
) -> tuple[list[list[int]], list[list[int] | None]]:
    """Tokenize texts and conversations with the tokenizer files of a folder in ``transformers``.

    Args:
        export_folder: the folder.
        texts: texts, tokenized without special tokens around them.
        chats: conversations; one that ends with the user's turn gets the generation prompt.
        variables: further variables of the chat template.

    Returns:
        Token ids of each text, and of each conversation; None for a conversation that the template refuses.

    Raises:
        EvaluationError: ``transformers`` cannot read the files.
        UserError: it is not installed.
    """
    transformers = require("transformers", extra="check", purpose="The check of an export")
    try:
        with _without_warnings():
            tokenizer = transformers.AutoTokenizer.from_pretrained(export_folder)
            text_ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    except Exception as error:  # raised by the other library
        raise EvaluationError(
            f"transformers cannot read the tokenizer in {export_folder}: {first_line(error)}."
        ) from error
    chat_ids: list[list[int] | None] = []
    for chat in chats:
        is_prompt = chat[-1]["role"] == "user"
        try:
            ids = tokenizer.apply_chat_template(
                list(chat), add_generation_prompt=is_prompt, return_dict=False, **variables
            )
        except Exception:  # noqa: BLE001 - there is no template, or it refuses the roles
            ids = None
        chat_ids.append(ids)
    return text_ids, chat_ids


def _read_with_transformers(transformers: Any, folder: Path | str) -> tuple[Any, list[str]]:
    """Return the model, and the tensors that are unknown to the library or missing.

    Raises:
        EvaluationError: tensors have other shapes than the library expects.
    """
    gguf = next(Path(folder).glob("*.gguf"), None)
    options: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf.name}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    class_name = "AutoModelForCausalLM"
    if config.architectures:  # a classifier, or another head
        class_name = config.architectures[0]
    model_class = getattr(transformers, class_name)
    # Otherwise, transformers raises an error without the names, which it logs.
    options.update(ignore_mismatched_sizes=True, output_loading_info=True)
    model, report = model_class.from_pretrained(folder, dtype=torch.float32, **options)
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, shape, expected_shape = mismatched[0]
        omitted = f", and so for {len(mismatched) - 1} more tensors" if len(mismatched) > 1 else ""
        hint = ""
        if gguf is not None:
            hint = (
                " (its reader of GGUF does not take over every size; llama-cpp-python is asked where it is installed)"
            )
        raise EvaluationError(
            f"it expects the shape {list(expected_shape)} of '{name}', which has {list(shape)}{omitted}{hint}"
        )
    return model, [*report["unexpected_keys"], *report["missing_keys"]]


def _read_with_peft(peft: Any, folder: Path) -> tuple[Any, list[str]]:
    """Return the base with the adapter, and the adapter's tensors that are unknown or missing."""
    transformers = require("transformers", extra="check", purpose="The check of an export")
    settings = peft.PeftConfig.from_pretrained(folder)
    base, _ = _read_with_transformers(transformers, settings.base_model_name_or_path)
    ids = getattr(settings, "trainable_token_indices", None) or []
    if isinstance(ids, dict):  # by the name of the embedding
        ids = next(iter(ids.values()))
    # New tokens are rows of the adapter alone: make room for them in the base, as AutoPeftModel does.
    if ids and max(ids) >= base.get_input_embeddings().num_embeddings:
        base.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    model = peft.PeftModel.from_pretrained(base, folder)
    report = peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(folder), device="cpu"))
    # The weights of the base are missing in an adapter's files, and need not be there.
    missing = [name for name in report.missing_keys if ".lora_" in name]
    return model, [*report.unexpected_keys, *missing]


def _read_with_llama_cpp(llama_cpp: Any, folder: Path) -> tuple[Any, list[str]]:
    """Return the model; llama.cpp itself refuses files with unknown or missing tensors."""
    file = next(folder.glob("*.gguf"))
    model = llama_cpp.Llama(str(file), logits_all=True, n_ctx=512, verbose=False)
    return model, []


def _compute(model: Any, prompts: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield logits ``[s, v]`` for each prompt, or ``[1, classes]`` of a classifier."""
    if isinstance(model, nn.Module):
        model.eval().to(device)
        for ids in prompts:
            logits = model(ids[None].to(device)).logits  # [1, s, v]; of a classifier [1, classes]
            if logits.dim() == 3:
                logits = logits[0]
            yield logits
        return
    for ids in prompts:  # llama.cpp
        model.reset()
        model.eval(ids.tolist())
        yield torch.from_numpy(model.scores[: len(ids)].copy())


_READERS = {
    "transformers": _read_with_transformers,
    "peft": _read_with_peft,
    "llama_cpp": _read_with_llama_cpp,
}
