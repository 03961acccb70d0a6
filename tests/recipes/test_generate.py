"""The recipe that answers a prompt, or a file of prompts."""

import json

import pytest
import torch

from tests.recipes.runs import set_up_on
from tests.tiny import read_lines, write_checkpoint, write_lines, write_tokenizer
from torchtune.config import ConfigError
from torchtune.generation import GenerationError, generate_tokens, prompt_row, read_prompts
from torchtune.tokenizers import hf_tokenizer
from torchtune.utils import UserError


def recipe_of(folder, **settings):
    """The recipe, set up, and its settings."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    settings = {"prompt": {"user": "the cat sees"}, "max_new_tokens": 12, "seed": 0, **settings}
    return set_up_on(checkpoint, "generate", folder, **settings)


def answer(folder, **settings):
    recipe, cfg = recipe_of(folder, **settings)
    text = recipe.generate(cfg)
    assert recipe.model.training  # as it was built
    return text


def test_model_and_tokenizer_are_those_of_the_checkpoint(tmp_path):
    messages = {
        "model": {
            "_component_": "torchtune.models.from_hf_config",
            "checkpoint_dir": str(tmp_path / "checkpoint"),
        },
        "tokenizer": {
            "_component_": "torchtune.tokenizers.hf_tokenizer",
            "path": str(tmp_path / "checkpoint"),
        },
    }
    tokens = answer(tmp_path)
    assert tokens
    assert tokens == answer(tmp_path, **messages)
    assert tokens == answer(tmp_path, top_k=0)
    greedy = answer(tmp_path, top_k=1)
    assert tokens != greedy
    assert answer(tmp_path, top_p=0.0) == greedy == answer(tmp_path, min_p=1.0)


def only(token):
    """A processor of logits that leaves one token."""

    def process(tokens, logits):
        is_other = torch.arange(logits.shape[-1], device=logits.device) != token
        return torch.zeros_like(logits).masked_fill(is_other, -torch.inf)

    return process


def test_logits_processors_are_components(tmp_path):
    recipe, cfg = recipe_of(tmp_path, logits_processors=[{"_component_": f"{__name__}.only", "token": 9}])
    word = recipe.tokenizer.decode([9])
    assert "".join(recipe.generate(cfg).split()) == word.strip() * 12
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text('"the cat"')
    for token in (9, 10):
        settings = {"prompts": str(prompts), "logits_processors": [{"_component_": f"{__name__}.only", "token": token}]}
        recipe, cfg = recipe_of(tmp_path, **settings)
        if token == 9:
            recipe.answer_file(cfg)
        else:
            with pytest.raises(GenerationError, match="of another model or of other settings"):
                recipe.answer_file(cfg)


def test_a_checkpointer_without_a_folder_needs_both(tmp_path):
    other_checkpointer = {"_component_": "torchtune.training.FullModelHFCheckpointer"}
    with pytest.raises(ConfigError) as raised:
        answer(tmp_path, checkpointer=other_checkpointer)
    for name in ("model", "tokenizer"):
        assert f"{name}: is not given, and checkpointer has no checkpoint_dir" in str(raised.value)


def test_answers_to_a_file(tmp_path):
    from transformers import AutoTokenizer

    conversation = [{"role": "system", "content": "a big cat"}, {"role": "user", "content": "the cat sees"}]
    prompt_rows = ["the cat sees", {"prompt": "a dog", "id": 7}, {"messages": conversation}, conversation, "red " * 30]
    prompts = tmp_path / "questions.jsonl"
    output = tmp_path / "questions.answers.jsonl"
    prompts.write_text("\n\n".join(json.dumps(row) for row in prompt_rows))
    recipe, cfg = recipe_of(tmp_path, prompts=str(prompts), max_sequences=2, temperature=0, prompt={"system": "blue"})
    recipe.answer_file(cfg)
    content = output.read_bytes()
    rows = read_lines(output)
    assert [row["line"] for row in rows] == [1, 3, 5, 7, 9]
    assert [row["prompt"] for row in rows] == prompt_rows
    assert rows[2]["answer"] == rows[3]["answer"]
    messages = [{"role": "system", "content": "blue"}, {"role": "user", "content": "a dog"}]
    ids = AutoTokenizer.from_pretrained(tmp_path / "checkpoint").apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    new = generate_tokens(recipe.model, [ids], max_new_tokens=12, temperature=0.0, stop_tokens=[2]).tokens[0].tolist()
    assert rows[1]["tokens"] == len(new)
    assert rows[1]["end"] == ("stop" if new[-1] == 2 else "max_new_tokens")
    # Killed while it wrote the fourth answer; the answers before it are not made again.
    lines = content.splitlines(keepends=True)
    edited = lines[2].replace(b'"answer": "', b'"answer": "kept ')
    output.write_bytes(edited + lines[0] + lines[1] + lines[3][:20])
    recipe.answer_file(cfg)
    assert output.read_bytes() == b"".join([*lines[:2], edited, *lines[3:]])
    cfg.temperature = 0.5
    with pytest.raises(GenerationError, match="another model or of other settings"):
        recipe.answer_file(cfg)
    output.unlink()
    recipe.answer_file(cfg)
    sampled = output.read_bytes()
    output.write_bytes(b"".join(sampled.splitlines(keepends=True)[3:]))
    recipe.answer_file(cfg)
    assert output.read_bytes() == sampled  # by seed and line, whatever was answered before
    cfg.output = str(tmp_path)
    with pytest.raises(UserError, match=r"cannot be written \(Is a directory\)"):
        recipe.answer_file(cfg)
    cfg.output = None
    # A tokenizer that keeps less than a prompt would cut it, and the turn that is to be answered with it.
    recipe.tokenizer.max_seq_len = 40
    with pytest.raises(GenerationError, match=r"line 9: tokenizer.max_seq_len = 40 truncates it"):
        recipe.answer_file(cfg)
    # Other weights under the same path.
    write_checkpoint(tmp_path / "checkpoint", seed=1)
    other_recipe, cfg = recipe_of(
        tmp_path, prompts=str(prompts), max_sequences=2, temperature=0.5, prompt={"system": "blue"}
    )
    with pytest.raises(GenerationError, match="another model or of other settings"):
        other_recipe.answer_file(cfg)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('"a"\nb', "line 2: no JSON"),
        ('{"text": "a"}', "line 1: the object needs either prompt or messages, it has text"),
        ("[]", "line 1: there is no turn to answer"),
        ('[{"role": "assistant", "content": "a"}]', "end with a turn of the user"),
        ("3", "line 1: .* give a text or a list of messages"),
    ],
)
def test_files_without_valid_prompts_are_refused(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(GenerationError, match=message):
        read_prompts(path)


def test_tools_and_system_prompts_of_a_file_reach_the_template(tmp_path):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    question = {"role": "user", "content": "red"}
    rows = [
        {"messages": [question], "tools": json.dumps(tools), "system": "own"},
        {"prompt": "red", "tools": tools},
        [question],
    ]
    with_tools, in_a_text, plain = read_prompts(write_lines(tmp_path / "prompts.jsonl", rows), system="given")
    assert [prompt.tools for prompt in (with_tools, in_a_text, plain)] == [tools, tools, None]
    assert [prompt.messages[0].text_content for prompt in (with_tools, in_a_text, plain)] == ["own", "given", "given"]
    write_tokenizer(tmp_path)
    template = "{{ tools | tojson if tools else 'none' }}{% for turn in messages %}{{ turn.content }}{% endfor %}"
    tokenizer = hf_tokenizer(str(tmp_path), chat_template=template)
    for prompt, text in ((with_tools, f"{json.dumps(tools)}ownred"), (plain, "nonegivenred")):
        row = prompt_row(tokenizer, prompt.messages, "prompt", prompt.tools)
        assert tokenizer.decode(row["tokens"], skip_special_tokens=False) == text
