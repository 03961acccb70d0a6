"""``tune chat`` from a pipe: answers, commands, and what ends an answer."""

import io
import signal

import pytest
import torch

from tests.tiny import write_adapter, write_checkpoint
from torchtune.modules import TransformerDecoder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("chat") / "checkpoint")


@pytest.fixture(scope="module")
def adapter(checkpoint):
    return write_adapter(checkpoint.parent / "adapter", checkpoint)


@pytest.fixture
def chat(tune, monkeypatch):
    """``tune chat`` with lines from a pipe."""

    def run(lines, *args):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return tune("chat", *"--device cpu --dtype fp32 --temperature 0 --max-new-tokens 6".split(), *args)

    return run


def reference(checkpoint, turns, adapter=None):
    """Six greedy tokens of ``transformers`` after user and assistant turns."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=2
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_chat_streams_answers_and_obeys_its_commands(checkpoint, adapter, chat):
    lines = "the cat\n\n/what\ncaf\udce9\n/system be brief\n/system\nthe cat\n/quit\nthe dog\n"
    result = chat(lines, "--model", checkpoint)
    first = reference(checkpoint, ["the cat"])
    assert result.out == 2 * f"{first}\n"
    assert "/what is not a command" in result.err
    assert "That line is not UTF-8" in result.err
    assert "(truncated at --max-new-tokens 6)" in result.err
    adapted = reference(checkpoint, ["the cat"], adapter)
    continued = reference(checkpoint, ["the cat", adapted, "a dog"], adapter)
    assert chat("the cat\na dog", "--model", checkpoint, "--adapter", adapter).out == f"{adapted}\n{continued}\n"
    assert adapted != first


def test_interrupt_and_full_context_end_an_answer(checkpoint, chat, monkeypatch, request):
    calls = []
    original = TransformerDecoder.forward

    def forward(self, *args, **kwargs):
        calls.append(1)
        self.max_seq_len = 60
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)  # Ctrl-C stops the answer
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TransformerDecoder, "forward", forward)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    result = chat("the cat\nthe cat\n" + "red " * 60, "--model", checkpoint, "--max-new-tokens", 500)
    assert len(result.out.splitlines()) >= 2
    assert "the context of 60 tokens is full" in result.err
    assert "start a new one with /reset." in result.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "nowhere"], "nowhere: there is no such folder"),
        (["--model", ".", "--temperature", -1], "--temperature is -1.0: it must be at least 0"),
        (["--model", "{}", "--adapter", "{}"], "there is no adapter_model.safetensors"),
    ],
)
def test_invalid_arguments_of_chat_are_refused(checkpoint, tune, args, message):
    result = tune("chat", *(str(arg).format(checkpoint) for arg in args))
    assert result.code == 2
    assert message in result.err
