"""Ids by words are those of the tokenizer itself, whatever the text."""

import random
from itertools import product

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from torchtune.data import DataError
from torchtune.tokenizers import GPT2BaseTokenizer
from torchtune.tokenizers._masked_encoding import WordEncoder

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

SPACES = []
for _length in (1, 2, 3):
    SPACES += ["".join(run) for run in product(" \n\t\r\u00a0\u3000", repeat=_length)]


def encode(encoder, text, spans):
    encoded = encoder.encode(text, spans)
    return None if encoded is None else (encoded[0].tolist(), list(map(bool, encoded[1])))


def make(kind, *, nfc=False, split=None):
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "caseless"))
    pre_tokenizer = SPLITS[kind] if split is None else pre_tokenizers.Sequence([split, BYTES])
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|end|>", "<|e", "<|")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    # White space of all kinds: where words are divided shows in ids alone if the vocabulary has it as a whole.
    spaces = "".join(run + end for run, end in product(SPACES, "a1.")) * 3
    tokenizer.train_from_iterator(["the cat's 12 cats they'll see the \u043a\u043e\u0442 中文 " * 3, spaces], trainer)
    return tokenizer


@pytest.mark.parametrize("nfc", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_ids_and_mask_are_those_of_the_tokenizer(split, nfc):
    tokenizer = make(split, nfc=nfc)
    draw = random.Random(split)
    encoder = WordEncoder(tokenizer)
    assert encoder.is_used
    used = masked = 0
    for _ in range(400):
        text = "".join(draw.choices(PARTS[: draw.choice([24, len(PARTS)])], k=draw.randint(0, 30)))
        edges = sorted(draw.sample(range(len(text) + 1), k=min(2 * draw.randint(0, 2), len(text) // 2 * 2)))
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        encoding = tokenizer.encode(text, add_special_tokens=False)
        if (plain_ids := encode(encoder, text, [])) is not None:
            used += 1
            assert plain_ids[0] == encoding.ids
        if (encoded := encode(encoder, text, spans)) is not None:
            masked += 1
            expected = []
            for first, last in encoding.offsets:
                is_covered = any(first < end and last > start for start, end in spans)
                expected.append(not is_covered)
            assert encoded == (encoding.ids, expected)
    assert used > 200
    assert masked > 40


@pytest.mark.parametrize("split", SPLITS)
def test_every_kind_of_white_space_has_the_ids_of_the_tokenizer(split):
    tokenizer = make(split)
    encoder = WordEncoder(tokenizer)
    for run, end in product(SPACES, "a1.'é"):
        text = f"{'the cat ' * 6}a{run}{end} b"
        encoded = encode(encoder, text, [])
        assert encoded is None or encoded[0] == tokenizer.encode(text, add_special_tokens=False).ids


def test_letters_of_many_scripts_have_the_ids_of_the_tokenizer():
    """A character that two engines class differently would change the words around it."""
    tokenizer = make("caseless")
    encoder = WordEncoder(tokenizer)
    for start in range(0x80, 0x1200, 64):
        text = " ".join(f"a{chr(code)}1 {chr(code)}" for code in range(start, start + 64))
        encoded = encode(encoder, text, [])
        assert encoded is None or encoded[0] == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Lowercase()),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<|x|>", lstrip=True)]),
        lambda tokenizer: tokenizer.add_special_tokens([AddedToken("<|y|>", normalized=True)]),
    ],
)
def test_unsupported_tokenizers_are_not_replaced(change):
    tokenizer = make("gpt2")
    change(tokenizer)
    assert WordEncoder(tokenizer).encode("the cat", []) is None


def test_bpe_of_other_characters_than_those_of_gpt2_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    tokenizer = GPT2BaseTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert tokenizer.bpe("aba") == "ab a"
    assert tokenizer.bpe("") == ""
    with pytest.raises(DataError, match="' ' is not one of them"):
        tokenizer.bpe("a b")


def test_gpt2_adds_only_tokens_of_its_vocabulary(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    paths = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    assert GPT2BaseTokenizer(*paths).encode("ab") == [2]
    tokenizer = GPT2BaseTokenizer(*paths, bos_id=7, eos_id=8)
    assert tokenizer.encode("ab") == [7, 2, 8]
    assert tokenizer.encode("ab", add_bos=False, add_eos=False) == [2]
