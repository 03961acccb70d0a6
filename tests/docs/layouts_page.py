"""The examples of docs/layouts.rst, made of the tokenizers: ``python -m tests.docs.layouts_page`` writes them."""

import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from tests.torchtune.models.named_layouts import ROWS, Row
from torchtune.data import Message, mask_messages

PAGE = Path(__file__).parents[2] / "docs" / "layouts.rst"
BEGIN, END = ".. layouts begin\n", ".. layouts end\n"
# Row of the table of layouts -> title.
SHOWN = {
    "gemma": "``gemma_tokenizer`` with ``prompt_template: torchtune.models.gemma.GemmaChatTemplate``",
    "llama2": "``llama2_tokenizer``",
    "llama3": "``llama3_tokenizer``",
    "mistral": "``mistral_tokenizer``",
    "mistral_v3_tekken": "``mistral_instruct_tokenizer``, third version, ``tekken.json``",
    "mistral_v7_tekken": "``mistral_instruct_tokenizer``, seventh version",
    "phi3": "``phi3_mini_tokenizer``",
    "phi4": "``phi4_tokenizer``",
    "qwen2": "``qwen2_tokenizer``, ``qwen2_5_tokenizer``, ``qwen3_tokenizer``",
    "qwen3": "``qwen3_tokenizer`` with ``thinking: True``",
}


def conversation(row: Row) -> list[Message]:
    """The conversation of the examples, in what the layout has a place for."""
    reasoning = {row.case.reasoning: "Small."} if row.case.reasoning else {}
    messages = [
        Message("system", "Be short."),
        Message("user", "What is red?"),
        Message("assistant", "A color."),
        Message("user", "And the cat?"),
        Message("assistant", "An animal.", extra=reasoning),
    ]
    mask_messages(messages, "train_on_assistant")
    return messages if row.case.system else messages[1:]


def text_of(theirs: Any, ids: list[int]) -> str:
    """Text of ids, special tokens and spaces included."""
    pieces = theirs.convert_ids_to_tokens(ids)
    if any(piece.startswith("<0x") or "▁" in piece for piece in theirs.get_vocab()):
        return re.sub("<0x(..)>", lambda match: chr(int(match[1], 16)), "".join(pieces)).replace("▁", " ")
    return theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def example(row: Row, folder: Path) -> str:
    """The layout of the conversation."""
    from transformers import PreTrainedTokenizerFast

    row.write(folder, row.case)
    tokenizer = row.ours(folder)
    hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens, mask = tokenizer.tokenize_messages(conversation(row))
    text = ""
    start = 0
    for i in range(1, len(tokens) + 1):
        if i == len(tokens) or mask[i] != mask[start]:
            part = text_of(hf_tokenizer, tokens[start:i])
            text += part if mask[start] else f"⟦{part}⟧"  # trained parts have brackets
            start = i
    return text


def examples() -> str:
    """What stands between the marks of the page."""
    rows = {row.case.name: row for row in ROWS}
    parts = []
    for name, title in SHOWN.items():
        with tempfile.TemporaryDirectory() as folder:
            body = textwrap.indent(
                example(rows[name], Path(folder)).rstrip("\n"), "   ", lambda line: line.strip() != ""
            )
        parts.append(f"{title}:\n\n.. code-block:: text\n\n{body}\n")
    return "\n" + "\n".join(parts) + "\n"


def parts_of_page() -> tuple[str, str, str]:
    """The page before, between and after the marks."""
    before, _, after_begin = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    between, _, after = after_begin.partition(END)
    return before, between, after


if __name__ == "__main__":
    before, _, after = parts_of_page()
    PAGE.write_text(before + BEGIN + examples() + END + after, encoding="utf-8")
