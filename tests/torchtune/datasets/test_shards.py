"""Shards that processes prepare by themselves are joined into what one process prepares, or refused by name."""

import itertools
import json
import shutil

import pytest
import yaml

from tests.tiny import CHATS, write_lines
from torchtune._recipe_registry import find_config
from torchtune.datasets import Shard, instantiate_dataset
from torchtune.datasets._token_store import PreparedRows, RowWriter
from torchtune.utils import UserError

ROWS = 900  # four batches of rows


def write_chats(path, count=ROWS):
    turns = [
        [{"role": "user", "content": "red " * (n % 7 + 1)}, {"role": "assistant", "content": "blue " * (n % 5 + 1)}]
        for n in range(count)
    ]
    return write_lines(path, [{"messages": messages} for messages in turns])


@pytest.fixture
def config(tokenizer_folder, tmp_path, monkeypatch):
    """A config file with training data of 900 rows, one of which cannot be trained on, and validation data of 40."""
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    lines = write_chats(tmp_path / "chats.jsonl").read_text().splitlines()
    lines[600] = '{"messages": []}'
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    write_chats(tmp_path / "held_out.jsonl", 40)
    settings = yaml.safe_load(find_config("smol/135M_lora_single_device").read_text())
    settings["tokenizer"] = {
        "_component_": "torchtune.tokenizers.hf_tokenizer",
        "path": str(tokenizer_folder),
        "max_seq_len": 128,
    }
    settings["dataset"] = {**CHATS, "source": str(tmp_path / "chats.jsonl"), "on_bad_row": "skip", "packed": True}
    settings["dataset_val"] = {**CHATS, "source": str(tmp_path / "held_out.jsonl")}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def contents(folder):
    """Content of all prepared rows in an output folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("[!s.]*/*")}


@pytest.mark.parametrize("count", [2, 5])  # five: more shards than batches
def test_joined_shards_equal_a_whole_preparation(config, tokenizer, tmp_path, tune, count):
    full_folder = tmp_path / "whole"
    sharded = tmp_path / "sharded"
    tune("data", "prepare", config, "--output", full_folder)
    for index in reversed(range(count)):
        out = tune("data", "prepare", config, "--output", sharded, "--shard", f"{index}/{count}").out
        assert f"tune data merge {sharded}" in out
    assert contents(sharded) == {}
    out = tune("data", "merge", sharded).out
    assert f"dataset: {count} shards, 900 rows (1 cannot be trained on), " in out
    assert f"dataset_val.prepared={sharded}" in out
    assert contents(sharded) == contents(full_folder)
    shutil.rmtree(sharded / "shards")
    node = yaml.safe_load(config.read_text())["dataset"]
    live = instantiate_dataset(node, tokenizer)
    prepared = instantiate_dataset({**node, "prepared": str(sharded)}, tokenizer)
    assert prepared.fingerprint == live.fingerprint
    assert len(prepared) == len(live) > 1
    assert str(prepared[len(live) - 1]) == str(live[len(live) - 1])


def test_manifest_says_what_a_shard_holds(config, tmp_path, tune):
    output = tmp_path / "prepared"
    tune("data", "prepare", config, "--output", output, "--shard", "1/2")
    manifest = json.loads((output / "shards" / "1-of-2" / "manifest.json").read_text())
    train, validation = manifest["datasets"]
    assert manifest["shard"] == "1/2"
    assert manifest["command"] == ["tune", "data", "prepare", str(config), "--output", str(output)]
    assert (train["name"], train["rows"], train["left_out"]) == ("dataset", 388, 1)  # rows 512 to 899
    # Its 40 rows are one batch, which the last shard has.
    assert (validation["name"], validation["rows"]) == ("dataset_val", 40)
    assert train["tokenizer"] == validation["tokenizer"]
    assert train["fingerprint"] != validation["fingerprint"]
    assert train["tokens"] > 388


def test_ranges_of_shards_cover_all_rows():
    for total, count in itertools.product([0, 1, 256, 257, 5000], [1, 2, 7, 40]):
        numbers = []
        for index in range(count):
            rows = Shard(index, count).rows(total)
            assert rows.start % 256 == 0
            numbers += rows
        assert numbers == list(range(total))


def test_finished_shard_is_reused_and_a_damaged_one_made_again(config, tmp_path, tune, caplog, monkeypatch):
    output = tmp_path / "prepared"
    written = []
    write = RowWriter.write

    def count_rows(writer, batch, facts):
        written.append(facts["rows"])
        write(writer, batch, facts)

    monkeypatch.setattr(RowWriter, "write", count_rows)

    def prepare():
        written.clear()
        tune("data", "prepare", config, "--output", output, "--shard", "0/2", "dataset_val=null")
        return sum(written)

    assert prepare() == 512
    assert prepare() == 0
    (file,) = output.glob("shards/0-of-2/*/*.arrow")
    before = file.read_bytes()
    file.write_bytes(before[:-2000])
    assert prepare() == 512
    assert "are damaged: they are prepared anew" in caplog.text
    assert file.read_bytes() == before


@pytest.fixture
def shards(config, tmp_path, tune):
    """An output folder with three shards, not joined."""
    output = tmp_path / "prepared"
    for index in range(3):
        tune("data", "prepare", config, "--output", output, "--shard", f"{index}/3", "dataset_val=null")
    return output


def refusal(tune, output):
    """The sentence of a refused merge, after which nothing is joined."""
    result = tune("data", "merge", output)
    assert result.code == 2
    assert contents(output) == {}
    assert len(result.err.strip().splitlines()) == 1
    return result.err


def test_unusable_shards_are_named_with_their_command(config, shards, tune, tmp_path):
    command = f"`tune data prepare {config} dataset_val=null --output {shards} --shard"
    folder = shards / "shards" / "1-of-3"

    folder.rename(tmp_path / "away")
    assert f"Shard 1/3 in {shards} is missing: prepare it with {command} 1/3`." in refusal(tune, shards)

    (shards / "shards" / "0-of-3").rename(tmp_path / "also away")
    assert f"Shard 0/3 in {shards} is missing (as 1/3): prepare it with {command} 0/3`." in refusal(tune, shards)
    (tmp_path / "also away").rename(shards / "shards" / "0-of-3")

    shutil.copytree(shards / "shards" / "2-of-3", folder)
    sentence = refusal(tune, shards)
    assert f"{folder} holds shard 2/3, which is there twice: remove this folder and prepare its own" in sentence
    assert f"{command} 1/3`" in sentence
    shutil.rmtree(folder)
    (tmp_path / "away").rename(folder)

    manifest = folder / "manifest.json"
    text = manifest.read_text()
    manifest.unlink()
    assert f"Shard 1/3 in {shards} is not finished: prepare it with {command} 1/3`." in refusal(tune, shards)
    manifest.write_text(text[:100])
    assert f"is damaged (its manifest.json cannot be read): prepare it again with {command} 1/3`" in refusal(
        tune, shards
    )
    manifest.write_text(text)

    (file,) = folder.glob("*/*.arrow")
    before = file.read_bytes()
    file.write_bytes(before[:-1000])
    fact = f"0000.arrow has {len(before) - 1000:,} of {len(before):,} bytes"
    assert f"Shard 1/3 in {shards} is damaged ({fact}): prepare it again with {command} 1/3`." in refusal(tune, shards)
    file.write_bytes(before[:-3000] + bytes(1000) + before[-2000:])
    assert f"is damaged (its checksum is another): prepare it again with {command} 1/3`." in refusal(tune, shards)
    file.unlink()
    assert "Shard 1/3 in" in refusal(tune, shards)
    tune("data", "prepare", config, "--output", shards, "--shard", "1/3", "dataset_val=null")
    assert "dataset: 3 shards, 900 rows" in tune("data", "merge", shards).out


def test_shard_of_other_settings_is_named(config, shards, tune):
    prepare = ("data", "prepare", config, "--output", shards, "dataset_val=null", "--shard")
    tune(*prepare, "1/3", "tokenizer.max_seq_len=64")
    sentence = refusal(tune, shards)
    assert (
        f"Shard 1/3 in {shards} does not go with shard 0/3, it was made with another tokenizer.max_seq_len" in sentence
    )
    assert "(was 128, now 64): prepare it again with" in sentence
    assert "dataset_val=null --output" in sentence
    tune(*prepare, "1/3", "dataset.masking_strategy=train_on_all")
    assert "it was made with another masks and columns" in refusal(tune, shards)
    tune(*prepare, "1/3")  # the rows are still there
    tune(*prepare, "0/4")
    assert "were prepared twice, as 3 and 4 shards: remove those of one division, for example with rm -r" in refusal(
        tune, shards
    )


def test_interrupted_join_goes_on(config, shards, tune, tmp_path, monkeypatch):
    write = RowWriter.write
    batches = iter(range(2))

    def interrupted(*args):
        if next(batches, None) is None:
            raise KeyboardInterrupt
        write(*args)

    monkeypatch.setattr(RowWriter, "write", interrupted)
    assert tune("data", "merge", shards).code == 130
    assert contents(shards) == {}
    monkeypatch.setattr(RowWriter, "write", write)
    tune("data", "merge", shards)
    tune("data", "prepare", config, "--output", tmp_path / "whole", "dataset_val=null")
    (joined,) = shards.glob("[!s.]*/")
    assert [path.name for path in sorted(joined.glob("*.arrow"))] == ["0000.arrow", "0001.arrow"]
    (full_file,) = (tmp_path / "whole").glob("*/")
    assert (joined / "meta.json").read_text() == (full_file / "meta.json").read_text()  # has the checksum of all rows
    assert PreparedRows(joined).sums == PreparedRows(full_file).sums


def test_shards_of_lists_and_mixtures_hold_every_dataset(config, tmp_path, tune, tokenizer):
    output = tmp_path / "prepared"
    settings = yaml.safe_load(config.read_text())
    node = {**settings["dataset"], "packed": False}
    validation = settings.pop("dataset_val")
    mixture = {"_component_": "torchtune.datasets.mixed_dataset", "datasets": {"a": node, "b": validation}}
    settings["dataset"] = mixture
    config.write_text(yaml.safe_dump(settings))
    for index in range(2):
        tune("data", "prepare", config, "--output", output, "--shard", f"{index}/2")
    out = tune("data", "merge", output).out
    assert out.count("in every node of dataset") == 2
    parts = {"a": {**node, "prepared": str(output)}, "b": {**validation, "prepared": str(output)}}
    assert len(instantiate_dataset({**mixture, "datasets": parts}, tokenizer)) > 900


def test_shards_that_are_no_shards_are_refused(config, tmp_path, tune):
    output = tmp_path / "prepared"
    for text, sentence in (
        ("4/4", "--shard 4/4 does not exist: shards are counted from 0, and the last is 3/4."),
        ("half", "--shard half is not a shard: give its number and the number of shards, such as 0/4."),
        ("0/0", "--shard 0/0 is one of no shards"),
    ):
        assert sentence in tune("data", "prepare", config, "--output", output, "--shard", text).err
    assert "There are no shards in" in tune("data", "merge", output).err
    (output / "shards" / "1-of-2").mkdir(parents=True)
    expected = (
        f"Shard 0/2 in {output} is missing (as 1/2): prepare it with `tune data prepare <config> --output {output}"
    )
    assert expected in tune("data", "merge", output).err
    streamed = ("dataset.streaming=True", "dataset.packed=False", "max_steps_per_epoch=1")
    err = tune("data", "prepare", config, "--output", output, "--shard", "0/2", *streamed).err
    assert "dataset: a stream is tokenized during training: remove streaming to prepare it." in err


def test_run_on_shards_that_are_not_joined_names_the_command(config, shards, tokenizer):
    node = yaml.safe_load(config.read_text())["dataset"]
    with pytest.raises(UserError, match=f"are shards: join them with tune data merge {shards}"):
        instantiate_dataset({**node, "prepared": str(shards)}, tokenizer)
