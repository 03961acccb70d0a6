"""Ids by words are those of the tokenizer itself, whatever the text."""

import random
from itertools import product
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from torchtune.tokenizers._cached_bpe import WordEncoder

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# What Qwen's and Llama's checkpoints split by.
CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "caseless": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CASELESS), behavior="isolated"), BYTES]),
}
PARTS = [
    *"aBs \n\t.,'!12<|>", "  ", "\r\n", "'ll", "'S", "the", " cat", "<|end|>", "é", "e\u0301", "ß", "中文",
    "\u043a\u043e\u0442", "½", "٣", "\u017f", "\u212a", "\u00a0", "\u2028", "\x1c", "\x85", "\u200b", "🙂", "\u0345",
    "\ud7ff", "\ufb01", "\u01c5", "\u3000", "\u180e",
]  # fmt: skip

SPACES = ["".join(run) for length in (1, 2, 3) for run in product(" \n\t\r\u00a0\u3000", repeat=length)]


def encode(encoder: WordEncoder, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]] | None:
    found = encoder.encode(text, spans)
    return None if found is None else (found[0].tolist(), list(map(bool, found[1])))


def make(kind: str, *, nfc: bool = False, split: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "caseless"))
    pre_tokenizer = SPLITS[kind] if split is None else pre_tokenizers.Sequence([split, BYTES])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|end|>", "<|e", "<|")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    # White space of all kinds: where words are divided shows in ids alone if the vocabulary has it as a whole.
    spaces = "".join(run + end for run in SPACES for end in "a1.") * 3
    tokenizer.train_from_iterator(["the cat's 12 cats they'll see the \u043a\u043e\u0442 中文 " * 3, spaces], trainer)
    return tokenizer


@pytest.mark.parametrize("nfc", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_ids_and_mask_are_those_of_the_tokenizer(split: str, nfc: bool) -> None:
    tokenizer, draw = make(split, nfc=nfc), random.Random(split)
    encoder = WordEncoder(tokenizer)
    assert encoder.is_used
    used = masked = 0
    for _ in range(400):
        text = "".join(draw.choices(PARTS[: draw.choice([24, len(PARTS)])], k=draw.randint(0, 30)))
        edges = sorted(draw.sample(range(len(text) + 1), k=min(2 * draw.randint(0, 2), len(text) // 2 * 2)))
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        encoding = tokenizer.encode(text, add_special_tokens=False)
        if (whole := encode(encoder, text, [])) is not None:
            used += 1
            assert whole[0] == encoding.ids
        if (found := encode(encoder, text, spans)) is not None:
            masked += 1
            expected = [not any(a < end and b > start for start, end in spans) for a, b in encoding.offsets]
            assert found == (encoding.ids, expected)
    assert used > 200
    assert masked > 40


SINGLE = [part for part in PARTS if not any(c.isspace() or c == "\x1c" for c in part)]


@pytest.mark.parametrize("split", SPLITS)
def test_what_lies_between_single_spaces_is_kept_as_a_whole(split: str) -> None:
    tokenizer, draw = make(split), random.Random(split)
    encoder = WordEncoder(tokenizer)
    masked = 0
    for _ in range(600):
        words = ["".join(draw.choices(SINGLE, k=draw.choice([1, 1, 2, 4, 20]))) for _ in range(draw.randint(1, 12))]
        text = "the cat " * 5 + words[0] + "".join(draw.choice(["\n", "\n\n", *[" "] * 8]) + word for word in words[1:])
        text = draw.choice(["", "", " ", "\n"]) + text + draw.choice(["", "", " ", "\n"])
        edges = sorted(draw.choices([i for i, c in enumerate(text) if c in " \n"] or [0], k=2))
        encoding = tokenizer.encode(text, add_special_tokens=False)
        whole, found = encode(encoder, text, []), encode(encoder, text, [tuple(edges)])
        if whole is not None:
            assert whole == (encoding.ids, [True] * len(encoding.ids))
        if found is not None:
            masked += edges[0] < edges[1]
            assert found == (encoding.ids, [not (a < edges[1] and b > edges[0]) for a, b in encoding.offsets])
    assert len(encoder._spaced) > 100
    for text in (f"{'the cat ' * 6}a{run}{end} b" for run in SPACES for end in "a1.'é"):
        found = encode(encoder, text, [])
        assert found is None or found[0] == tokenizer.encode(text, add_special_tokens=False).ids
    assert masked > 100


def test_special_tokens_with_spaces() -> None:
    tokenizer = make("gpt2")
    tokenizer.add_special_tokens([AddedToken("<|a b|>", special=True, normalized=False)])
    text = "<|end|>cat<|a b|> the cat's cat"
    assert encode(WordEncoder(tokenizer), text, [])[0] == tokenizer.encode(text, add_special_tokens=False).ids


def test_an_expression_that_sees_more_than_one_space_at_once() -> None:
    """Words that go on behind a space, or depend on what is before one, are found by the expression."""
    own = [
        r"the cat",
        r"(?<=the )cat",
        r"\p{L}+(?= )",
        r"[a-z ]+",
        r"the\x20cat",
        r"[^'o]+",
        r"t.e.ca",
        r"[\W]c",
        r"e\b c",
    ]
    for pattern in (rf"{one}| ?\p{{L}}+|\s+|." for one in own):
        tokenizer = make("caseless", split=pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
        text = "a cat 'the cat of 'the cats 'the " * 3
        found = encode(WordEncoder(tokenizer), text, [])
        assert found is None or found[0] == tokenizer.encode(text, add_special_tokens=False).ids


def test_every_letter_of_many_scripts() -> None:
    """A character that two engines class differently would change the words around it."""
    tokenizer = make("caseless")
    encoder = WordEncoder(tokenizer)
    for start in range(0x80, 0x1200, 64):
        text = " ".join(f"a{chr(code)}1 {chr(code)}" for code in range(start, start + 64))
        found = encode(encoder, text, [])
        assert found is None or found[0] == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Lowercase()),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<|x|>", lstrip=True)]),
    ],
)
def test_other_kinds_of_tokenizers_do_it_themselves(change: Any) -> None:
    tokenizer = make("gpt2")
    change(tokenizer)
    assert WordEncoder(tokenizer).encode("the cat", []) is None
