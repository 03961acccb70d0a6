"""The table of tokenizers with a layout of their own: files, the same tokenizer of ``transformers``, the truth.

Beside its own files every row writes a folder that ``transformers`` loads: the same vocabulary, with the layout as a
chat template. A truth marks whole turns of the assistant, headers included, because these tokenizers train on them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.torchtune.models.tokenizer_files import write_bpe, write_ranks, write_sentencepiece, write_tekken
from tests.torchtune.tokenizers import chat_templates as plain
from tests.torchtune.tokenizers import chat_templates_mistral as mistral
from tests.torchtune.tokenizers import chat_templates_tools as tools
from tests.torchtune.tokenizers.chat_case import Case, Pieces, Turns, assistant
from torchtune.models.gemma import gemma_tokenizer
from torchtune.models.llama2 import llama2_tokenizer
from torchtune.models.llama3 import llama3_tokenizer
from torchtune.models.mistral import mistral_instruct_tokenizer, mistral_tokenizer
from torchtune.models.phi3 import phi3_mini_tokenizer
from torchtune.models.phi4 import phi4_tokenizer
from torchtune.models.qwen2 import PRETOKENIZE_REGEX, qwen2_tokenizer
from torchtune.models.qwen2_5 import qwen2_5_tokenizer
from torchtune.models.qwen3 import qwen3_tokenizer
from torchtune.tokenizers import CL100K_PATTERN

Encoded = tuple[list[int], list[bool]]


@dataclass
class Row:
    case: Case
    write: Callable[[Path, Case], None]  # ours and that of transformers, into one folder
    ours: Callable[[Path], Any]
    finish: Callable[[Encoded, Any], Encoded] = lambda encoded, ours: encoded  # what ours ends otherwise
    roles: dict[str, str] = field(default_factory=dict)  # role -> its name for ours
    needs_system: bool = False  # the template adds a system turn of its own, ours does not
    fill: bool = False  # a text that is empty has no space in front
    rstrip: bool = False  # spaces at the end of a text are dropped
    parses: Callable[[Path], Any] | None = None  # ours, where it can be asked to parse control tokens


def write_fast(folder: Path, case: Case, tokenizer: Tokenizer) -> None:
    special = [AddedToken(token, special=True, normalized=False) for token in case.special]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in case.plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": case.template}
    config |= {"bos_token": case.bos, "eos_token": case.eos, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def bytes_of(pattern: str, *, nfc: bool = False) -> Callable[[Path, Case], None]:
    """Vocabulary and merges, and the same as ranks."""

    def write(folder: Path, case: Case) -> None:
        write_ranks(folder / "tokenizer.model")
        tokenizer = Tokenizer(models.BPE.from_file(*write_bpe(folder)))
        if nfc:
            tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        write_fast(folder, case, tokenizer)

    return write


def tekken(version: str, *, names_control: bool) -> Callable[[Path, Case], None]:
    """``tekken.json``: control tokens first, more vocabulary than the model has."""

    def write(folder: Path, case: Case) -> None:
        vocab_file, merges_file = write_bpe(folder)
        write_tekken(folder / "tekken.json", case.special, version, pattern=CL100K_PATTERN, names_control=names_control)
        vocab, merges = models.BPE.read_file(vocab_file, merges_file)
        vocab = {token: i + len(case.special) for token, i in vocab.items()}
        vocab |= {token: i for i, token in enumerate(case.special)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        split = pre_tokenizers.Split(Regex(CL100K_PATTERN), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        write_fast(folder, case, tokenizer)

    return write


def pieces_of(*, space: bool = True, **settings: Any) -> Callable[[Path, Case], None]:
    """A SentencePiece model, for ``transformers`` with or without a space behind special tokens."""

    def write(folder: Path, case: Case) -> None:
        from transformers import LlamaTokenizerFast

        write_sentencepiece(folder / "tokenizer.model", **settings)
        tokenizer = LlamaTokenizerFast.from_pretrained(folder, legacy=True)._tokenizer
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if space else "never", split=False)
        write_fast(folder, case, tokenizer)

    return write


def turns_trained(truth: Callable[..., Pieces], opening: str = "") -> Callable[..., Pieces]:
    """The truth of every turn alone, trained on as a whole where it is the assistant's."""

    def whole(turns: Turns) -> Pieces:
        pieces = [(opening, False)]
        for turn in turns:
            text = "".join(piece for piece, _ in truth([turn]))
            pieces.append((text, assistant(turn)))
        return pieces

    return whole


def qwen_whole(truth: Callable[..., Pieces]) -> Callable[..., Pieces]:
    """Whole turns; answers of tools in a row share one."""

    def whole(turns: Turns) -> Pieces:
        pieces = []
        current = ""
        for text, _ in truth(turns):
            current += text
            if current.endswith("<|im_end|>\n"):
                pieces.append((current, current.startswith("<|im_start|>assistant")))
                current = ""
        return pieces

    return whole


def exchanges(turns: Turns) -> Pieces:
    """``<s>[INST] <<SYS>> … [/INST] answer</s>``."""
    pieces: Pieces = []
    system = ""
    for turn in turns:
        if turn["role"] == "system":
            system = f"<<SYS>>\n{turn['content']}\n<</SYS>>\n\n"
        elif turn["role"] == "user":
            pieces.append((f"<s>[INST] {system}{turn['content']} [/INST]", False))
            system = ""
        else:
            pieces.append((f" {turn['content']}".rstrip(" ") + "</s>", True))
    return pieces


INST = """{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = '<<SYS>>\\n' + m['content'] + '\\n<</SYS>>\\n\\n' %}{% elif m['role'] == 'user' %}{{ bos_token + '[INST] ' + ns.system + m['content'] + ' [/INST]' }}{% set ns.system = '' %}{% else %}{{ (' ' + m['content'] if m['content'] else '') + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501
PHI3 = plain.PHI3.replace(" and message['content']", "").replace("{% for", "{{ bos_token }}{% for", 1)
PHI = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<s>", "</s>"]
IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = [
    f"<|{n}|>" for n in "begin_of_text end_of_text start_header_id end_header_id eom_id eot_id python_tag".split()
]
QWEN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def without_last(encoded: Encoded, ours: Any) -> Encoded:
    return encoded[0][:-1], encoded[1][:-1]


def with_eos(encoded: Encoded, ours: Any) -> Encoded:
    return [*encoded[0], ours.eos_id], [*encoded[1], True]


def qwen(builder: Callable[..., Any], **settings: Any) -> Callable[[Path], Any]:
    return lambda folder: builder(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        special_tokens_path=str(folder / "tokenizer.json"),
        **settings,
    )


def qwen_row(name: str, builder: Callable[..., Any], case: Case, **settings: Any) -> Row:
    case.name = name
    return Row(
        case,
        bytes_of(PRETOKENIZE_REGEX, nfc=True),
        qwen(builder, **settings),
        finish=without_last,
        roles={"tool": "ipython"},
        needs_system=name == "qwen2_5",
        parses=qwen(builder, parse_special_tokens=True, **settings),
    )


def _qwen3(thinks: bool) -> Case:
    return Case(
        "qwen3", tools.QWEN3, qwen_whole(tools.qwen3(thinks=thinks)), IM, "<|im_end|>", tool=True, plain=QWEN,
        reasoning="reasoning_content", switches={} if thinks else {"enable_thinking": False},
    )  # fmt: skip


_llama3 = plain.blocks("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", True)
_phi4 = plain.blocks("<|im_start|>", "<|im_sep|>", "<|im_end|>", "")
_chatml = plain.blocks("<|im_start|>", "\n", "<|im_end|>")


def _mistral(name: str, template: str, truth: Callable[..., Pieces], control: int) -> Case:
    special = mistral.CONTROL[:control]
    return Case(name, template, truth, special, "</s>", bos="<s>", tool=True, calls=True, shows_tools=True)


def gemma_pieces(folder: Path, case: Case) -> None:
    from transformers import GemmaTokenizerFast

    settings = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>"}
    settings["user_defined_symbols"] = case.special[2:]
    write_sentencepiece(folder / "tokenizer.model", add_dummy_prefix=False, **settings)
    write_fast(folder, case, GemmaTokenizerFast.from_pretrained(folder)._tokenizer)


def gemma_turns(turns: Turns) -> Pieces:
    """Whole turns of the assistant; white space between them is theirs."""
    pieces = plain.gemma3(turns)
    merged: Pieces = [pieces[0]]
    for header, text, header_end in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        merged.append((header[0] + text[0] + header_end[0], text[1]))
    return merged


plain_gemma = Case(
    "gemma", plain.GEMMA3, gemma_turns, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<eos>", bos="<bos>"
)
ROWS = [
    Row(
        plain_gemma,
        gemma_pieces,
        lambda folder: gemma_tokenizer(
            str(folder / "tokenizer.model"), prompt_template="torchtune.models.gemma.GemmaChatTemplate"
        ),
    ),
    Row(
        Case("llama2", INST, exchanges, ["<s>", "</s>"], "</s>", bos="<s>"),
        pieces_of(),
        lambda folder: llama2_tokenizer(str(folder / "tokenizer.model")),
        rstrip=True,
    ),
    Row(
        Case("mistral", INST, exchanges, ["<s>", "</s>"], "</s>", bos="<s>", system=False),
        pieces_of(),
        lambda folder: mistral_tokenizer(str(folder / "tokenizer.model")),
        rstrip=True,
    ),
    Row(
        Case("llama3", plain.LLAMA3, turns_trained(_llama3, LLAMA3[0]), LLAMA3, LLAMA3[1], bos=LLAMA3[0], tool=True),
        bytes_of(CL100K_PATTERN),
        lambda folder: llama3_tokenizer(str(folder / "tokenizer.model"), str(folder / "tokenizer.json")),
        finish=with_eos,
    ),
    Row(
        Case(
            "phi3",
            PHI3,
            lambda turns: [*turns_trained(plain.blocks("<|", "|>\n", "<|end|>"), "<s>")(turns), (PHI[0], False)],
            PHI,
            PHI[0],
            bos="<s>",
        ),
        pieces_of(space=False),
        lambda folder: phi3_mini_tokenizer(str(folder / "tokenizer.model"), str(folder / "tokenizer.json")),
    ),
    Row(
        Case("phi4", plain.PHI4, turns_trained(_phi4), [*IM, "<|im_sep|>"], "<|im_end|>"),
        bytes_of(CL100K_PATTERN),
        lambda folder: phi4_tokenizer(
            str(folder / "vocab.json"), str(folder / "merges.txt"), str(folder / "tokenizer.json")
        ),
    ),
    qwen_row("qwen2", qwen2_tokenizer, Case("", plain.CHATML, turns_trained(_chatml), IM, "<|im_end|>", plain=QWEN)),
    qwen_row(
        "qwen2_5",
        qwen2_5_tokenizer,
        Case("", tools.QWEN2_5, qwen_whole(tools.qwen2_5), IM, "<|im_end|>", tool=True, plain=QWEN[:2]),
    ),
    qwen_row("qwen3", qwen3_tokenizer, _qwen3(True), thinking=True),
    qwen_row("qwen3_no_think", qwen3_tokenizer, _qwen3(False), thinking=False),
    Row(
        _mistral("mistral_v3", mistral.V3_PARSED, mistral.v3(" ", parsed=True), 10),
        pieces_of(control_symbols=mistral.CONTROL[3:10]),
        lambda folder: mistral_instruct_tokenizer(str(folder / "tokenizer.model")),
        fill=True,
    ),
    Row(
        _mistral("mistral_v3_tekken", mistral.V3_TEKKEN_PARSED, mistral.v3("", parsed=True), 10),
        tekken("v3", names_control=False),
        lambda folder: mistral_instruct_tokenizer(str(folder / "tekken.json")),
    ),
    Row(
        _mistral("mistral_v7_tekken", mistral.V7_TEKKEN, mistral.v7_tekken, 13),
        tekken("v7", names_control=True),
        lambda folder: mistral_instruct_tokenizer(str(folder / "tekken.json")),
    ),
]
