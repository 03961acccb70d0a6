"""Ids of ``transformers`` and hand-made masks, for every template and conversation."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.torchtune.modules.transforms.chat_case import Case, Pieces, Turns
from tests.torchtune.modules.transforms.chat_conversations import (
    CALL_CONVERSATIONS,
    CONVERSATIONS,
    TOOL_CONVERSATIONS,
    exchange,
)
from tests.torchtune.modules.transforms.chat_layouts import CASES
from torchtune.data import DataError, Message, mask_messages
from torchtune.modules.transforms.tokenizers import HuggingFaceModelTokenizer, hf_tokenizer

TEXT = [text["content"] for turns in CONVERSATIONS.values() for text in turns]
_made: dict[tuple[str, bool], tuple[HuggingFaceModelTokenizer, Any]] = {}


def write_checkpoint(folder: Path, case: Case, *, metaspace: bool = False) -> None:
    """Write a small tokenizer with the template of ``case``."""
    tokenizer = Tokenizer(models.BPE())
    step = pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = step
    tokenizer.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    alphabet = sorted(set("".join(TEXT))) if metaspace else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=case.special, initial_alphabet=alphabet, show_progress=False
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


def pair(case: Case, tmp: Path, *, metaspace: bool = False) -> tuple[HuggingFaceModelTokenizer, Any]:
    """Our tokenizer and that of ``transformers``."""
    from transformers import PreTrainedTokenizerFast

    if (case.name, metaspace) not in _made:
        folder = tmp / f"{case.name}{metaspace}"
        write_checkpoint(folder, case, metaspace=metaspace)
        _made[case.name, metaspace] = hf_tokenizer(str(folder)), PreTrainedTokenizerFast.from_pretrained(folder)
    return _made[case.name, metaspace]


def messages_of(turns: Turns) -> list[Message]:
    messages = [
        Message(turn["role"], turn["content"], extra={k: turn[k] for k in turn if k not in ("role", "content")})
        for turn in turns
    ]
    mask_messages(messages, "train_on_assistant")
    return messages


def expected_mask(pieces: Pieces, offsets: list[tuple[int, int]]) -> list[bool]:
    """A token is trained on if it covers a trained character."""
    trained = [is_trained for text, is_trained in pieces for _ in text]
    return [not any(trained[start:end]) for start, end in offsets]


def runs() -> list[Any]:
    found = []
    for case in CASES:
        conversations = dict(CONVERSATIONS)
        conversations |= TOOL_CONVERSATIONS if case.tool else {}
        conversations |= CALL_CONVERSATIONS if case.name.startswith("qwen") else {}
        for name, turns in conversations.items():
            if case.system or turns[0]["role"] != "system":
                found.append(pytest.param(case, turns, id=f"{case.name}: {name}"))
    return found


def check(case: Case, turns: Turns, tmp: Path, *, metaspace: bool = False) -> None:
    ours, theirs = pair(case, tmp, metaspace=metaspace)
    pieces = case.truth(turns)
    text = "".join(piece for piece, _ in pieces)
    reference = theirs.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert theirs.apply_chat_template(turns, tokenize=False) == text, "the truth itself is wrong"

    tokens, mask = ours.tokenize_messages(messages_of(turns))
    if not case.closes:
        assert (tokens.pop(), mask.pop()) == (ours.eos_id, False)
    assert tokens == reference
    offsets = theirs._tokenizer.encode(text, add_special_tokens=False).offsets
    assert mask == expected_mask(pieces, offsets)


@pytest.mark.parametrize(("case", "turns"), runs())
def test_ids_and_mask(case: Case, turns: Turns, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(case, turns, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("llama2", "mistral", "zephyr")], ids=lambda c: c.name)
@pytest.mark.parametrize("name", ["three exchanges", "same texts", "code"])
def test_ids_and_mask_with_metaspace(case: Case, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(case, CONVERSATIONS[name], tmp_path_factory.getbasetemp(), metaspace=True)


PARTS = [
    "a", "b ", " c", "\n", "\n\n", "assistant", "user", "<think>", "</think>", "<", "|", "[/INST]", "im_end", "🙂",
    "é", "red", "Standin0Text", " ", "\t", "{{x}}", "<|im", "s>",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_ids_and_mask_of_confusing_texts(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        case = rng.choice(CASES)
        texts = ["".join(rng.choices(PARTS, k=rng.randint(0, 5))) for _ in range(rng.choice((2, 4, 6)))]
        system = [{"role": "system", "content": rng.choice(PARTS)}] if case.system and rng.random() < 0.3 else []
        check(case, [*system, *exchange(*texts)], tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_turn_trains_its_end(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    ours, _ = pair(case, tmp_path_factory.getbasetemp())
    tokens, mask = ours.tokenize_messages(messages_of(exchange("one", "two", "three", "four", "five", "six")))
    ends = [i for i in range(len(tokens)) if not mask[i] and (i + 1 == len(tokens) or mask[i + 1])]
    assert len(ends) == 3
    assert all(tokens[i] in ours.stop_tokens for i in ends)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_prompt_of_inference_is_the_prompt_of_training(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ours, theirs = pair(case, tmp_path_factory.getbasetemp())
    turns = exchange("one", "two", "three", "")
    prompt = ours({"messages": messages_of(turns)}, inference=True)["tokens"]
    assert prompt == theirs.apply_chat_template(turns[:-1], add_generation_prompt=True, return_dict=False)


def test_only_the_last_turn(tmp_path: Path) -> None:
    for case in CASES:
        ours, _ = pair(case, tmp_path)
        messages = messages_of(exchange("one", "two", "three", "four"))
        mask_messages(messages, "train_on_last")
        tokens, mask = ours.tokenize_messages(messages)
        text = ours.decode([token for token, masked in zip(tokens, mask, strict=True) if not masked])
        assert "four" in text
        assert "two" not in text, case.name


def test_training_on_users_too(tmp_path: Path) -> None:
    for case in CASES:
        ours, _ = pair(case, tmp_path)
        messages = messages_of(exchange("one", "two", "three", "four"))
        mask_messages(messages, "train_on_all")
        tokens, mask = ours.tokenize_messages(messages)
        text = ours.decode([token for token, masked in zip(tokens, mask, strict=True) if not masked])
        assert all(word in text for word in ("one", "two", "three", "four")), case.name


@pytest.mark.parametrize("name", ["mistral", "llama2", "gemma"])
def test_a_conversation_that_the_template_refuses(name: str, tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == name)
    ours, _ = pair(case, tmp_path)
    turns = [*exchange("one", "two"), {"role": "assistant", "content": "three"}]
    with pytest.raises(DataError, match=r"refuses the conversation.*alternate"):
        ours.tokenize_messages(messages_of(turns))
