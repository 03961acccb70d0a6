"""What tune data prepare writes is what a run would make itself, or it is refused by name."""

import os
import signal

import pytest
import yaml

from tests.tiny import CHATS, OPENAI, write_conversations, write_lines
from tests.torchtune.datasets.test_row_cache import is_mapped
from tests.work import largest_file
from torchtune._recipe_registry import find_config
from torchtune.data import DataError, collate_documents
from torchtune.datasets import (
    NotRead,
    chat_dataset,
    instantiate_dataset,
    kto_dataset,
    preparing,
    preview,
    text_completion_dataset,
)
from torchtune.datasets._token_store import RowWriter
from torchtune.estimate._check_run import _check_sources
from torchtune.tokenizers import hf_tokenizer
from torchtune.utils import UserError


@pytest.fixture
def chats(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    return write_conversations(tmp_path / "chats.jsonl", 40)


def test_prepared_data_give_the_batches_of_live_data(chats, tokenizer, tokenizer_folder, tmp_path, tune):
    config = tmp_path / "mine.yaml"
    folder = tmp_path / "prepared"
    node = {**CHATS, "source": str(chats), "packed": True}
    settings = {
        "tokenizer": {
            "_component_": "torchtune.tokenizers.hf_tokenizer",
            "path": str(tokenizer_folder),
            "max_seq_len": 128,
        },
        "dataset": node,
    }
    shipped = yaml.safe_load(find_config("smol/135M_lora_single_device").read_text())
    config.write_text(yaml.safe_dump({**shipped, **settings}))
    assert f"dataset.prepared={folder}" in tune("data", "prepare", config, "--output", folder).out
    assert not (tmp_path / "cache").exists()
    prepared = instantiate_dataset({**node, "prepared": str(folder)}, tokenizer)
    assert not (tmp_path / "cache").exists()  # nothing was made
    live = instantiate_dataset(node, tokenizer)
    assert prepared.fingerprint == live.fingerprint
    assert len(prepared) == len(live) > 1
    for i in range(len(live)):
        prepared_batch = collate_documents([prepared[i]])
        live_batch = collate_documents([live[i]])
        assert prepared_batch.tokens.equal(live_batch.tokens)
        assert prepared_batch.labels.equal(live_batch.labels)
        assert prepared_batch.documents.lengths == live_batch.documents.lengths
    assert is_mapped(prepared.ds.store[0]["tokens"], folder)
    _check_sources({**node, "prepared": str(folder)})
    with preview(0), pytest.raises(NotRead):
        chat_dataset(tokenizer, source=str(chats), prepared=str(folder), **OPENAI)


def test_difference_from_prepared_rows_is_named(chats, tokenizer, tokenizer_folder, tmp_path):
    folder = tmp_path / "prepared"

    def read(tokenizer, **settings):
        return chat_dataset(tokenizer, source=str(chats), prepared=folder, **OPENAI, **settings)

    with pytest.raises(DataError, match=r"There is no folder .*prepared with prepared rows: write it with tune data"):
        read(tokenizer)
    folder.mkdir()
    with pytest.raises(DataError, match="There are no prepared rows in"):
        read(tokenizer)
    with preparing(folder):
        read(tokenizer)
    assert len(read(tokenizer)) == 40
    with pytest.raises(DataError, match=r"another tokenizer.max_seq_len \(was 128, now 64\): prepare them again"):
        read(hf_tokenizer(str(tokenizer_folder), max_seq_len=64))
    with pytest.raises(DataError, match=r"made with another tokenizer.chat_templates: "):
        read(hf_tokenizer(str(tokenizer_folder), max_seq_len=128, chat_template="{# #}" + _template(tokenizer)))
    with pytest.raises(DataError, match=r"made with another masks and columns.masking_strategy: "):
        read(tokenizer, masking_strategy="train_on_last")
    with pytest.raises(DataError, match="made with another dataset and another "):
        text_completion_dataset(tokenizer, str(chats), column="messages", prepared=folder)
    (shard,) = folder.glob("*/*.arrow")
    shard_bytes = shard.read_bytes()
    for damaged in (shard_bytes[:-4], bytes(len(shard_bytes))):
        shard.write_bytes(damaged)
        with pytest.raises(DataError, match=r"The rows in .*prepared are damaged: prepare them again with tune data"):
            read(tokenizer)
    with preparing(folder):
        read(tokenizer)
    assert shard.read_bytes() == shard_bytes
    (meta,) = folder.glob("*/meta.json")
    before = meta.read_text()
    meta.write_text("[" * 9999)
    with pytest.raises(DataError, match=r"meta.json is not valid JSON \(it is nested too deeply\)"):
        read(tokenizer, masking_strategy="train_on_last")
    meta.write_text(before)
    chats.write_text(chats.read_text().replace("red", "cat", 1))
    with pytest.raises(DataError, match="made with other content of the data: "):
        read(tokenizer)


def test_other_folders_of_the_output_are_kept(chats, tokenizer, tmp_path):
    names = ["run-1", "run-lora", "own-data", ".notes.part", ".run-1.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").touch()
        for path in (tmp_path / name / "a", tmp_path / name):
            os.utime(path, (0, 0))
    left = tmp_path / f".{'a' * 64}.part"
    left.mkdir()
    os.utime(left, (0, 0))
    with preparing(tmp_path):
        chat_dataset(tokenizer, source=str(chats), **OPENAI)
    assert [name for name in names if not (tmp_path / name / "a").exists()] == []
    assert not left.exists()


def _template(tokenizer):
    return tokenizer.chat_templates["default"].source


def test_full_disk_leaves_no_partial_preparation(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue " * 20}]
    folder = tmp_path / "prepared"

    def read():
        return chat_dataset(tokenizer, source=[{"messages": turns}] * 100, prepared=folder, **OPENAI)

    with (
        preparing(folder),
        largest_file(4096),
        pytest.raises(DataError, match="or choose another --output; nothing is"),
    ):
        read()
    assert not list(folder.iterdir())
    with largest_file(4096), pytest.raises(DataError, match="TORCHTUNE_CACHE to a folder of your own on") as caught:
        chat_dataset(tokenizer, source=[{"messages": turns}] * 100, **OPENAI)
    assert "output" not in str(caught.value)
    with pytest.raises(DataError, match="There are no prepared rows in"):
        read()
    with preparing(folder):
        read()
    assert len(read()) == 100


def test_a_transform_without_a_fingerprint_cannot_be_prepared(tokenizer, tmp_path):
    with preparing(tmp_path), pytest.raises(UserError, match="needs an attribute fingerprint"):
        chat_dataset(tokenizer, source=[{"messages": []}], filter_fn=lambda row: True, **OPENAI)


def test_preparation_resumes_after_a_kill(tokenizer, tokenizer_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "answers.jsonl"
    folder = tmp_path / "prepared"
    rows = [{"prompt": "a" * (n % 5 + 1), "completion": "b", "label": n % 3 == 0} for n in range(900)]
    del rows[7]["completion"], rows[600]["completion"]
    write_lines(source, rows)

    def read(tokenizer=tokenizer, **settings):
        return kto_dataset(tokenizer, source=str(source), on_bad_row="skip", **settings)

    def killed_after(batches, tokenizer=tokenizer):
        if (child := os.fork()) == 0:
            write = RowWriter.write
            left = iter(range(batches - 1))

            def written(*args):
                write(*args)
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                monkeypatch.setattr(RowWriter, "write", written)
                with preparing(folder):
                    read(tokenizer)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    killed_after(1)
    for path in folder.glob(".*.part/*"):  # was killed while it wrote
        with path.open("ab") as file:
            file.write(b'{"done": 7, ')
    killed_after(2)
    *_, last = sorted(folder.glob(".*.part/*.arrow"))
    shard_bytes = last.read_bytes()
    last.write_bytes(shard_bytes[:-4096] + bytes(4096))  # damaged: the zeros are within the labels of the last batch
    with pytest.raises(DataError, match="There are no prepared rows in"):
        read(prepared=folder)
    killed_after(1, hf_tokenizer(str(tokenizer_folder), max_seq_len=64))
    with preparing(folder), caplog.at_level("INFO", "torchtune"):
        read()
    assert "Going on behind 512 rows that were tokenized before." in caplog.text
    assert len(list(folder.glob(".*.part"))) == 1  # of the other tokenizer
    prepared = read(prepared=folder)
    live = read()
    assert prepared.fingerprint == live.fingerprint
    assert len(prepared) == len(live) == 898
    assert all(prepared[i] == live[i] for i in range(0, 898, 7))
    assert prepared.dropped == live.dropped == [7, 600]


def test_simultaneous_preparations_write_once(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    children = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            outputs = []
            try:
                with preparing(tmp_path):
                    outputs = chat_dataset(tokenizer, source=[{"messages": turns}] * 600, **OPENAI)
            finally:
                os._exit(0 if len(outputs) == 600 else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert len(list(tmp_path.glob("*/meta.json"))) == 1
    assert not list(tmp_path.glob(".*"))
