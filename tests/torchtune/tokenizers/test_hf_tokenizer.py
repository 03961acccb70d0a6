"""Files of a checkpoint's tokenizer, and what is said when they are missing or broken."""

import json
from types import MappingProxyType

import pytest

from tests.tiny import CHAT_TEMPLATE, write_tokenizer
from tests.torchtune.tokenizers.chat_templates import CHATML
from torchtune.data import DataError, Message, mask_messages
from torchtune.tokenizers import (
    HuggingFaceBaseTokenizer,
    HuggingFaceModelTokenizer,
    hf_tokenizer,
    parse_hf_tokenizer_json,
)
from torchtune.utils import UserError, get_logger

CHAT = [Message("user", "red"), Message("assistant", "blue")]
mask_messages(CHAT, "train_on_assistant")


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def change(folder, name="tokenizer_config.json", **settings):
    content = json.loads((folder / name).read_text()) | settings
    (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_folder_and_its_file_give_the_same_tokenizer(folder):
    from_folder = hf_tokenizer(str(folder))
    from_file = hf_tokenizer(str(folder / "tokenizer.json"))
    from_three_files = HuggingFaceModelTokenizer(
        str(folder / "tokenizer.json"),
        tokenizer_config_json_path=str(folder / "tokenizer_config.json"),
        generation_config_path=str(folder / "generation_config.json"),
    )
    assert (
        from_folder.tokenize_messages(CHAT)
        == from_file.tokenize_messages(CHAT)
        == from_three_files.tokenize_messages(CHAT)
    )
    assert (from_folder.bos_id, from_folder.eos_id, from_folder.pad_id, from_folder.vocab_size) == (1, 2, 0, 316)
    assert from_folder.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def test_stop_tokens_come_from_everywhere(folder):
    change(folder, eos_token="<|endoftext|>")
    change(folder, "generation_config.json", eos_token_id=[0, 7])
    tokenizer = hf_tokenizer(str(folder))
    assert tokenizer.stop_tokens == [2, 0, 7], "the template's end of turn, the config's eos, generation's"
    assert tokenizer.tokenize_messages(CHAT)[0][-2] == 2


def test_tokenizer_without_configs_has_no_special_ids_or_template(folder):
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    tokenizer = HuggingFaceBaseTokenizer(str(folder / "tokenizer.json"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_tokens) == (None, None, 0, [])
    assert tokenizer.encode("red") == tokenizer.encode("red", add_bos=False, add_eos=False)
    with pytest.raises(DataError, match="no chat template"):
        hf_tokenizer(str(folder)).tokenize_messages(CHAT)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_config_that_is_not_a_json_object_is_refused(folder, name):
    (folder / name).write_text("[]")
    with pytest.raises(DataError, match=f"{name} .*{name} holds no JSON object: download it again"):
        hf_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("text", ["[" * 200_000, '{"a": ' * 200_000, '{"a": ' + "7" * 6000 + "}"])
def test_json_that_python_cannot_read_is_named(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} is broken \((it is nested too deeply|Exceeds .*)\): download"):
        hf_tokenizer(str(folder))


def test_decode_restores_the_encoded_text(folder):
    tokenizer = hf_tokenizer(str(folder))
    ids = tokenizer.encode("red 你好 🙂")
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "red 你好 🙂"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "red 你好 🙂<|im_end|>"


@pytest.mark.parametrize("template", [None, "<|im_start|> $A", "$A <|im_end|>", "<|endoftext|> $A"])
def test_the_beginning_of_a_text_is_that_of_transformers(folder, template):
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer

    if template is not None:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        backend.save(str(folder / "tokenizer.json"))
    change(folder, bos_token="<|endoftext|>" if "endoftext" in str(template) else "<|im_start|>")
    expected_ids = [token for token in AutoTokenizer.from_pretrained(folder)("red blue").input_ids if token != 2]
    tokenizer = hf_tokenizer(str(folder))
    assert (
        tokenizer.encode("red blue", add_eos=False) == tokenizer.encode_text("red blue", add_eos=False) == expected_ids
    )


@pytest.mark.parametrize("form", ["list", "file", "json", "folder", "argument", "path"])
def test_chat_template_is_read_from_every_published_file(folder, form):
    expected = hf_tokenizer(str(folder)).tokenize_messages(CHAT)
    unused_template = "{{ raise_exception('the wrong one') }}"
    change(folder, chat_template=unused_template)
    arguments = {}
    if form == "list":
        entries = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": unused_template}]
        change(folder, chat_template=entries)
    elif form == "file":
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    elif form == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    elif form == "folder":
        change(folder, chat_template=CHAT_TEMPLATE)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(unused_template)
    elif form == "argument":
        arguments = {"chat_template": CHAT_TEMPLATE}
    else:
        (folder / "mine.jinja").write_text(CHAT_TEMPLATE)
        arguments = {"chat_template": str(folder / "mine.jinja")}
    tokenizer = hf_tokenizer(str(folder), **arguments)
    assert tokenizer.tokenize_messages(CHAT) == expected
    if form in ("list", "folder"):
        with pytest.raises(DataError, match="the wrong one"):
            tokenizer.tokenize_messages(CHAT, tools=[{"name": "f"}])


@pytest.mark.parametrize("name", ["chatml", "mine.jinja", "/nowhere/mine.jinja"])
def test_missing_chat_template_file_is_refused(folder, name):
    with pytest.raises(DataError, match=f"There is no file '{name}': chat_template is the path"):
        hf_tokenizer(str(folder), chat_template=name)


@pytest.mark.parametrize(
    "template", [8, False, [1], ["{{ a }}"], [{"name": "default"}], [{"name": [1], "template": "a"}], {"default": 1}]
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_published_chat_template_of_another_type_is_refused(folder, name, template):
    (folder / name).write_text(json.dumps({"chat_template": template}))
    with pytest.raises(DataError, match=f"{name}: chat_template is neither a text nor a list of texts"):
        hf_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [(8, "chat_template is a int: give"), (["a"], "is a list: give"), ("m" * 70_000, "There is no file 'm")],
)
def test_chat_template_setting_that_is_neither_text_nor_path_is_refused(folder, chosen, message):
    with pytest.raises(DataError, match=message) as caught:
        hf_tokenizer(str(folder), chat_template=chosen)
    assert len(str(caught.value)) < 500


def test_syntax_error_of_a_chat_template_is_named_by_line(folder):
    with pytest.raises(DataError, match=r"error in line 2: unexpected end of template, expected .*[^.]\.$"):
        hf_tokenizer(str(folder), chat_template="a\n{{ x")


def test_tools_reach_the_template(folder):
    template = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML
    tokenizer = hf_tokenizer(str(folder), chat_template=template)
    tokens = tokenizer({"messages": CHAT, "tools": [{"name": "größe"}]})["tokens"]
    assert tokenizer.decode(tokens).startswith('[{"name": "größe"}]\n')


def test_texts_that_spell_special_tokens_are_logged_once(folder, monkeypatch, caplog):
    chat = [Message("user", "a<|endoftext|>b", masked=True), Message("assistant", "c")]
    tokenizer = hf_tokenizer(str(folder))
    messages = []
    monkeypatch.setattr(get_logger(), "handle", lambda record: messages.append(record.getMessage()))
    with caplog.at_level("INFO", logger="torchtune"):
        for _ in range(3):
            assert 0 not in tokenizer.tokenize_messages(chat)[0]
    assert len(messages) == 1
    assert messages[0].startswith("A text of the data spells '<|endoftext|>': it is read as text.")
    assert 0 in hf_tokenizer(str(folder), parse_special_tokens=True).tokenize_messages(chat)[0]


def test_nothing_in_tools_is_a_control_token(folder):
    tokenizer = hf_tokenizer(str(folder), chat_template="{{ tools | tojson }}" + CHATML)
    tools = [{"<|endoftext|>": ["<|endoftext|>", 1, None]}]
    tokens = tokenizer.tokenize_messages(CHAT, tools=tools)[0]
    assert 0 not in tokens
    assert tokenizer.decode(tokens).startswith(json.dumps(tools))
    read_only = [{"function": MappingProxyType(tools[0])}]
    tokens = tokenizer.tokenize_messages(CHAT, tools=read_only)[0]
    assert 0 not in tokens
    assert tokenizer.decode(tokens).startswith(json.dumps([{"function": tools[0]}]))


def test_open_conversation_ends_where_the_model_continues(folder):
    tokenizer = hf_tokenizer(str(folder))
    open_turn = "<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"
    for messages, begun in ((CHAT[:1], ""), ([CHAT[0], Message("assistant", "")], ""), (CHAT, "blue")):
        tokens = tokenizer({"messages": messages}, inference=True)["tokens"]
        assert tokenizer.decode(tokens, skip_special_tokens=False) == open_turn + begun
    with pytest.warns(FutureWarning, match="use add_end_tokens"):
        assert tokenizer.tokenize_messages(CHAT, add_eos=False)[0] == tokens


@pytest.mark.parametrize("length", [3, 8, 12])
def test_row_is_truncated_to_max_seq_len(folder, length):
    all_tokens, mask = hf_tokenizer(str(folder)).tokenize_messages(CHAT)
    assert hf_tokenizer(str(folder), max_seq_len=length).tokenize_messages(CHAT) == (
        [*all_tokens[: length - 1], 2],
        [*mask[: length - 1], True],
    )
    tokens, cut = hf_tokenizer(str(folder), max_seq_len=length, truncation_type="left").tokenize_messages(CHAT)
    assert (tokens, cut) == (all_tokens[-length:], mask[-length:])
    assert len(hf_tokenizer(str(folder)).tokenize_messages(CHAT, max_seq_len=length)[0]) == length


@pytest.mark.parametrize("length", [0, -5])
def test_a_length_without_room_is_refused(folder, length):
    with pytest.raises(UserError, match=f"max_seq_len must be at least 1, not {length}"):
        hf_tokenizer(str(folder), max_seq_len=length).tokenize_messages(CHAT)


@pytest.mark.parametrize("cut", ["left", "right"])
def test_a_cut_row_keeps_the_label_of_the_end_of_its_turn(folder, cut):
    """The template ends turns with another token than the end of the sequence, as Llama 3's does."""
    change(folder, eos_token="<|endoftext|>", chat_template=CHATML)
    all_tokens, mask = hf_tokenizer(str(folder)).tokenize_messages(CHAT)
    end = len(all_tokens) - all_tokens[::-1].index(2)  # behind the last <|im_end|>
    assert not mask[end - 1]
    length = end if cut == "right" else len(all_tokens) - 3
    extra = [Message("user", "one two", masked=True)] if cut == "right" else []
    tokenizer = hf_tokenizer(str(folder), max_seq_len=length, truncation_type=cut)
    tokens, masked = tokenizer.tokenize_messages([*CHAT, *extra])
    assert [token for token, hidden in zip(tokens, masked, strict=True) if not hidden][-1] == 2
    assert 0 not in tokens


def test_special_tokens_of_the_config_extend_the_vocabulary(folder):
    change(folder, pad_token="<pad>", added_tokens_decoder={"316": {"content": "<new>", "special": True}})
    tokenizer = hf_tokenizer(str(folder))
    assert tokenizer.special_tokens["<new>"] == 316
    assert tokenizer.pad_id == 317
    assert tokenizer.vocab_size == 318
    change(folder, added_tokens_decoder={"400": {"content": "<far>"}})
    with pytest.raises(DataError, match=r"'<far>' the id 400, but the vocabulary of tokenizer.json ends at 315"):
        hf_tokenizer(str(folder))


def test_missing_and_broken_tokenizer_files_are_named(folder, tmp_path):
    with pytest.raises(DataError, match="There is no tokenizer file"):
        hf_tokenizer(str(tmp_path / "nothing"))
    assert parse_hf_tokenizer_json(str(folder / "tokenizer.json"))["<|im_end|>"] == 2
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match=r"tokenizer.json is broken at line \d+"):
        hf_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text('{"model": {"type": "Unheard"}}')
    with pytest.raises(DataError, match="is not one that the tokenizers package reads"):
        hf_tokenizer(str(folder))
    with pytest.raises(DataError, match="no 'added_tokens'"):
        parse_hf_tokenizer_json(str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not a text file"):
        hf_tokenizer(str(folder))


def test_templates_run_in_a_sandbox(folder):
    for attack in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        with pytest.raises(DataError, match="refuses the conversation"):
            hf_tokenizer(str(folder), chat_template=attack).tokenize_messages(CHAT)
    with pytest.raises(DataError, match="chat template has an error in line 1"):
        hf_tokenizer(str(folder), chat_template="{% for %}")


def test_renderings_of_a_conversation_have_the_same_time(folder):
    template = "{{ strftime_now('%f') }}" + CHATML
    tokenizer = hf_tokenizer(str(folder), chat_template=template)
    for _ in range(20):
        mask = tokenizer.tokenize_messages(CHAT)[1]
        assert mask.count(False) == len(tokenizer.encode("blue", False, False)) + 1


def test_rearranged_turn_is_refused(folder):
    """Contents reversed: what the model writes is nowhere in the order in which it writes it."""
    template = "{% for m in messages %}{{ m['content'] | reverse }}{% endfor %}{{ messages | length }}<|im_end|>"
    tokenizer = hf_tokenizer(str(folder), chat_template=template)
    chat = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    mask_messages(chat, "train_on_assistant")
    with pytest.raises(DataError, match="cannot tell which part of the rendered conversation is turn 1"):
        tokenizer.tokenize_messages(chat)


def test_images_and_empty_conversations_are_refused(folder):
    tokenizer = hf_tokenizer(str(folder))
    with pytest.raises(DataError, match="holds an image"):
        tokenizer.tokenize_messages([Message("user", [{"type": "image", "content": 1}])])
    with pytest.raises(DataError, match="no turns"):
        tokenizer.tokenize_messages([])
