"""The data of the quickstart are what they say: right, enough, and without overlap."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("quickstart_make_data", FOLDER / "make_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name):
    turns_of_rows = []
    for line in (FOLDER / "data" / name).read_text().splitlines():
        messages = json.loads(line)["messages"]
        turns_of_rows.append({message["role"]: message["content"] for message in messages})
    return turns_of_rows


def test_the_committed_files_are_what_the_script_makes(maker):
    assert {name: (FOLDER / "data" / name).read_text() for name in maker.files()} == maker.files()


def test_files_are_large_enough_and_without_duplicates():
    train, held_out = rows("train.jsonl"), rows("held_out.jsonl")
    assert len(train) >= 500
    assert len(held_out) >= 100
    assert len({row["user"] for row in train + held_out}) == len(train) + len(held_out)


def test_no_word_of_an_open_class_is_on_both_sides(maker):
    def words(side):
        return set(re.findall(r"\w+", " ".join(side[key] for key in side if key != "patterns").lower()))

    assert len(words(maker.TRAIN)) > 300
    assert len(words(maker.HELD_OUT)) > 60
    assert not words(maker.TRAIN) & words(maker.HELD_OUT)


def test_no_sentence_pattern_is_on_both_sides(maker):
    def patterns(side):
        return {re.sub(r"\W+", " ", line).strip() for line in side["patterns"].strip().splitlines()}

    assert not patterns(maker.TRAIN) & patterns(maker.HELD_OUT)
    held_out = rows("held_out.jsonl")
    numbers = {json.loads(row["assistant"])["count"] for row in rows("train.jsonl")}
    assert sum(json.loads(row["assistant"])["count"] not in numbers for row in held_out) >= 10


def test_every_answer_has_the_facts_of_its_sentence(maker):
    for row in rows("train.jsonl") + rows("held_out.jsonl"):
        answer = json.loads(row["assistant"])
        sentence = row["user"]
        assert list(answer) == ["name", "count", "city", "day"]
        assert row["assistant"] == json.dumps(answer, separators=(",", ":"))
        days = [short for day, short in maker.DAYS.items() if day in sentence]
        assert days == ([] if answer["day"] is None else [answer["day"]])
        spellings = {maker.in_words(answer["count"]), str(answer["count"])}
        assert spellings & set(re.findall(r"[\w-]+", sentence.lower()))
        for key in ("name", "city"):
            assert answer[key] is None or answer[key].lower() in sentence.lower()
