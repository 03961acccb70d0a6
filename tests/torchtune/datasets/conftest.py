"""A small tokenizer, and a cache of its own for every run of the tests."""

import pytest

from tests.tiny import write_tokenizer
from torchtune.tokenizers import hf_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder):
    return hf_tokenizer(str(tokenizer_folder), max_seq_len=128)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets_cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
