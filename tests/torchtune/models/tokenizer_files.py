"""Small tokenizer files in the formats of released checkpoints."""

import base64
import json
from pathlib import Path
from typing import Any

TEXT = [
    "red green blue one two three cat dog bird sees likes finds the and not why where big small",
    "system user assistant ipython tool You are a helpful assistant. What is the colour of the sky?",
    "[INST] <<SYS>> <</SYS>> [/INST] Answer: blue, or grey. Grüße naïve 你好 Привет",
] * 20


def write_bpe(folder: Path) -> tuple[str, str]:
    """Write ``vocab.json`` and ``merges.txt`` of a byte-level BPE; return their paths."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXT, vocab_size=400, show_progress=False)
    tokenizer.save_model(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def write_ranks(path: Path) -> str:
    """Write the ranks of a byte-pair encoding, as ``tiktoken`` files have them."""
    vocab = json.loads(Path(write_bpe(path.parent)[0]).read_text())
    from torchtune.tokenizers._masked_encoding import bytes_to_unicode

    to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
    lines = []
    for rank, token in enumerate(sorted(vocab, key=vocab.get)):
        token_bytes = bytes(to_byte[character] for character in token)
        lines.append(base64.b64encode(token_bytes) + b" %d\n" % rank)
    path.write_bytes(b"".join(lines))
    return str(path)


def write_tekken(
    path: Path, control: list[str], version: str = "v3", *, pattern: str, names_control: bool = True
) -> str:
    """Write a ``tekken.json`` of the same tokens; ``control`` come first in its ids."""
    ranks = [line.split() for line in Path(write_ranks(path.with_suffix(".ranks"))).read_text().splitlines()]
    vocab = [{"rank": int(rank), "token_bytes": token, "token_str": None} for token, rank in ranks]
    beyond = {"rank": len(vocab), "token_bytes": base64.b64encode(b"beyond the model").decode(), "token_str": None}
    config = {
        "pattern": pattern,
        "num_vocab_tokens": len(vocab) + 1,
        "default_vocab_size": len(vocab) + len(control),
        "default_num_special_tokens": len(control),
        "version": version,
    }
    content = {"config": config, "vocab": [*vocab, beyond]}
    if names_control:
        content["special_tokens"] = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(control)]
    path.write_text(json.dumps(content))
    return str(path)


def write_sentencepiece(path: Path, **settings: Any) -> str:
    """Train a small SentencePiece model, with ids of its special tokens like Llama 2's, unless ``settings`` differ."""
    import sentencepiece

    corpus = path.with_suffix(".txt")
    corpus.write_text("\n".join(TEXT))
    settings = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, **settings}
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(path.with_suffix("")),
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return str(path)
