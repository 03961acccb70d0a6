"""Ids of ``transformers`` and hand-made masks, for every template and conversation."""

import itertools
import json
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.torchtune.tokenizers.chat_checks import (
    expected_mask,
    expected_plain,
    messages_of,
    replaced,
    truth_of,
)
from tests.torchtune.tokenizers.chat_conversations import (
    CALL_CONVERSATIONS,
    CONVERSATIONS,
    conversations,
    exchange,
)
from tests.torchtune.tokenizers.chat_layouts import CASES
from torchtune.data import DataError, mask_messages
from torchtune.tokenizers import HuggingFaceModelTokenizer, StreamDecoder, hf_tokenizer

TEXT = [turn["content"] for turn in itertools.chain.from_iterable(CONVERSATIONS.values())]
COUNT = 60


class Three(NamedTuple):
    """One checkpoint's tokenizer: ours, ours that parses special tokens in texts, that of ``transformers``."""

    ours: HuggingFaceModelTokenizer
    parsing: HuggingFaceModelTokenizer
    theirs: Any


_made: dict[tuple[str, bool], Three] = {}


def write_checkpoint(folder, case, *, metaspace=False):
    """Write a small tokenizer with the template of ``case``."""
    tokenizer = Tokenizer(models.BPE())
    step = pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = step
    tokenizer.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    alphabet = sorted(set("".join(TEXT))) if metaspace else pre_tokenizers.ByteLevel.alphabet()
    special = [
        AddedToken(token, special=True, normalized=False, rstrip=token in case.takes_spaces) for token in case.special
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in case.plain])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": case.bos,
        "eos_token": case.eos,
        "chat_template": case.template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [tokenizer.token_to_id(token) for token in case.stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def three(case, tmp, *, metaspace=False):
    """The tokenizers of a case; made once."""
    from transformers import PreTrainedTokenizerFast

    if (case.name, metaspace) not in _made:
        folder = tmp / f"{case.name}{metaspace}"
        write_checkpoint(folder, case, metaspace=metaspace)
        _made[case.name, metaspace] = Three(
            hf_tokenizer(str(folder), chat_template_kwargs=case.switches),
            hf_tokenizer(str(folder), chat_template_kwargs=case.switches, parse_special_tokens=True),
            PreTrainedTokenizerFast.from_pretrained(folder),
        )
    return _made[case.name, metaspace]


def check(case, turns, tmp, tools=None, *, metaspace=False):
    """Compare one conversation; returns whether its texts spell control tokens."""
    our_tokenizer, parsing, hf_tokenizer = three(case, tmp, metaspace=metaspace)
    pieces = truth_of(case, turns, tools)
    text = "".join(piece for piece, _ in pieces)
    assert hf_tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, **case.switches) == text, (
        "the truth is wrong"
    )
    reference = hf_tokenizer.apply_chat_template(turns, tools=tools, return_dict=False, **case.switches)
    offsets = hf_tokenizer._tokenizer.encode(text, add_special_tokens=False).offsets
    spelled = replaced(turns, case.special, ["" for _ in case.special]) != turns

    def tokenized(tokenizer):
        tokens, mask = tokenizer.tokenize_messages(messages_of(turns), tools=tools)
        is_closed = tokenizer is parsing and pieces[-1][0].rstrip().endswith(tuple(case.special))
        if not case.closes and not is_closed:
            assert (tokens.pop(), mask.pop()) == (our_tokenizer.eos_id, False)
        return tokens, mask

    tokens, mask = tokenized(parsing)
    assert tokens == reference
    if spelled:  # which of two ends of a turn is the real one is anyone's guess
        assert tokenized(our_tokenizer) == expected_plain(case, turns, tools, hf_tokenizer._tokenizer)
    else:
        assert mask == expected_mask(pieces, offsets)
        assert tokenized(our_tokenizer) == (tokens, mask)
    return spelled


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ids_are_those_of_transformers_and_masks_the_expected(case, tmp_path_factory):
    spelled = 0
    for name, turns, tools in conversations(case, COUNT):
        try:
            spelled += check(case, turns, tmp_path_factory.getbasetemp(), tools)
        except (AssertionError, DataError) as error:
            raise AssertionError(f"{name}: {turns}") from error
    assert spelled >= 5, "conversations whose texts spell control tokens"


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("llama2", "mistral", "zephyr")], ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["three exchanges", "same texts", "code"])
def test_metaspace_tokenizers_have_the_same_ids_and_masks(case, name, tmp_path_factory):
    check(case, CONVERSATIONS[name], tmp_path_factory.getbasetemp(), metaspace=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decoding_token_by_token_gives_whole_characters(case, tmp_path_factory):
    tokenizer = three(case, tmp_path_factory.getbasetemp()).ours
    for name, turns, tools in conversations(case, COUNT)[:30]:
        stream = StreamDecoder(tokenizer)
        tokens = tokenizer.tokenize_messages(messages_of(turns), tools=tools)[0]
        parts = [stream.put(token) for token in tokens]
        assert "".join(parts) + stream.end() == tokenizer.decode(tokens), name
        assert not any("\ufffd" in part for part in parts), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_end_of_every_turn_is_trained(case, tmp_path_factory):
    tokenizer, *_ = three(case, tmp_path_factory.getbasetemp())
    tokens, mask = tokenizer.tokenize_messages(messages_of(exchange("one", "two", "three", "four", "five", "six")))
    ends = [i for i in range(len(tokens)) if not mask[i] and (i + 1 == len(tokens) or mask[i + 1])]
    assert len(ends) == 3
    allowed = [*tokenizer.stop_tokens, *(tokenizer.special_tokens[end] for end in case.ends)]
    assert all(tokens[i] in allowed for i in ends)
    assert not {tokenizer.special_tokens[end] for end in case.ends} & set(tokenizer.stop_tokens)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_prompt_of_inference_is_the_prompt_of_training(case, tmp_path_factory):
    tokenizer, _, hf_tokenizer = three(case, tmp_path_factory.getbasetemp())
    turns = exchange("one", "two", "three", "")
    prompt = tokenizer({"messages": messages_of(turns)}, inference=True)["tokens"]
    assert prompt == hf_tokenizer.apply_chat_template(
        turns[:-1], add_generation_prompt=True, return_dict=False, **case.switches
    )


def trained_text(tokenizer, strategy):
    """What is trained on of two exchanges."""
    messages = messages_of(exchange("one", "two", "three", "four"))
    mask_messages(messages, strategy)
    tokens, mask = tokenizer.tokenize_messages(messages)
    return tokenizer.decode([token for token, masked in zip(tokens, mask, strict=True) if not masked])


def test_train_on_last_labels_only_the_last_turn(tmp_path):
    for case in CASES:
        text = trained_text(three(case, tmp_path).ours, "train_on_last")
        assert "four" in text
        assert "two" not in text, case.name


def test_train_on_all_labels_user_turns(tmp_path):
    for case in CASES:
        text = trained_text(three(case, tmp_path).ours, "train_on_all")
        assert all(word in text for word in ("one", "two", "three", "four")), case.name


def named(name, folder):
    """The tokenizer with the template of a name."""
    (case,) = (case for case in CASES if case.name == name)
    return three(case, folder).ours


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_reasoning_is_read_from_any_of_its_fields(name, tmp_path):
    tokenizer = named(name, tmp_path)
    rows = []
    for field in ("reasoning_content", "thinking", "reasoning"):
        turns = exchange("one", "two")
        turns[1][field] = "because"
        rows.append(tokenizer.tokenize_messages(messages_of(turns)))
    assert rows[0] == rows[1] == rows[2]
    assert "because" in tokenizer.decode(rows[0][0])


@pytest.mark.parametrize("name", ["llama3_1", "gpt_oss"])
def test_second_call_that_the_template_omits_is_refused(name, tmp_path):
    tokenizer = named(name, tmp_path)
    with pytest.raises(DataError, match="writes 1 of the 2 tool_calls of turn 1"):
        tokenizer.tokenize_messages(messages_of(CALL_CONVERSATIONS["two structured calls"]))


@pytest.mark.parametrize("name", ["mistral", "llama2"])
def test_refusal_of_the_template_is_reported(name, tmp_path):
    tokenizer = named(name, tmp_path)
    turns = [*exchange("one", "two"), {"role": "assistant", "content": "three"}]
    with pytest.raises(DataError, match=r"refuses the conversation.*alternate"):
        tokenizer.tokenize_messages(messages_of(turns))
