"""The examples in the docstrings of public names run; how many names lack one may only shrink."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import torchtune
from docs._ext.faces import public_names
from tests.tiny import write_checkpoint
from torchtune.models import from_hf_config
from torchtune.tokenizers import hf_tokenizer

ROOT = Path(__file__).parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Classes and functions without an example. Who adds a public name adds an example; may only shrink.
MAX_LACKING = 130


def faces():
    """Packages that the reference documents, without the families of models."""
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.rst")) if path.name != "models.rst"]
    return [*dict.fromkeys(re.findall(r"public-face:: (\S+)", "".join(pages))), "torchtune.models"]


def documented():
    """(package, name, class or function) of this library, each once; errors and protocols need no example."""
    seen = set()
    for face in faces():
        for name in public_names(face):
            value = getattr(importlib.import_module(face), name)
            is_ours = getattr(value, "__module__", "").startswith("torchtune")
            if not is_ours or not (inspect.isclass(value) or inspect.isfunction(value)) or value in seen:
                continue
            seen.add(value)
            if inspect.isclass(value) and (issubclass(value, BaseException) or getattr(value, "_is_protocol", False)):
                continue
            yield face, name, value


@pytest.mark.filterwarnings("ignore::FutureWarning")  # names of older recipes say that they are old
def test_examples_of_docstrings_run(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    parser = doctest.DocTestParser()
    printed = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    lacking = []
    run = 0
    for face, name, value in documented():
        text = inspect.getdoc(value) or ""
        if ">>>" not in text:
            lacking.append(f"{face}.{name}")
            assert not inspect.isclass(value), f"{lacking[-1]}: every public class has an example"
            continue
        folder = tmp_path / f"{face}.{name}"
        folder.mkdir()
        torch.manual_seed(0)
        names = {"torch": torch, "torchtune": torchtune, "checkpoint": checkpoint, "folder": folder}
        names |= {"model": from_hf_config(checkpoint), "tokenizer": hf_tokenizer(str(checkpoint))}
        runner.run(parser.get_doctest(text, names, f"{face}.{name}", None, None), out=printed.append)
        run += 1
    assert not runner.summarize(verbose=False).failed, "".join(printed)
    assert run > 100
    assert len(lacking) <= MAX_LACKING, f"write examples for the new ones of {lacking}"
