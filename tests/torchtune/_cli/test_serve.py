"""``tune serve`` over real sockets: answers, tool calls, sessions for training, errors, and the end."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from argparse import Namespace
from contextlib import closing, contextmanager

import pytest
import torch
from torch import nn

from tests.serving import serving
from tests.tiny import write_adapter, write_checkpoint
from tests.torchtune._cli.test_chat import reference
from tests.torchtune.rlhf.environments.test_turn_tokens import CALL, PUBLISHED, TOOLS, conversation, make
from torchtune._cli._chat_api import ChatServer, _MarkBuffer
from torchtune._cli.serve import _load
from torchtune._cli.tune import main
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.generation import GenerationError, Job
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import token_log_probs
from torchtune.rlhf import RolloutError, collate_rollouts
from torchtune.rlhf.environments import Sessions, detect_format, episodes_of

CAT = [{"role": "user", "content": "the cat"}]


def ask(port, body, path="/v1/chat/completions", method="POST", **headers):
    """Send a request; return status and parsed body, or the events of a stream."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        reply = connection.getresponse()
        text = reply.read().decode()
    if reply.headers["Content-Type"] == "text/event-stream":
        events = text.removesuffix("\n\n").split("\n\n")
        assert events.pop() == "data: [DONE]"
        return reply.status, [json.loads(event.removeprefix("data: ")) for event in events]
    return reply.status, json.loads(text)


def content(port, messages, model="tiny", **more):
    """Answer of at most six tokens, greedily."""
    status, reply = ask(port, {"model": model, "messages": messages, "temperature": 0, "max_tokens": 6, **more})
    assert status == 200, reply
    return reply["choices"][0]["message"]["content"]


@contextmanager
def running(models, tokenizer, **options):
    options = {"tool_format": None, "max_new_tokens": 12, **options}
    with ChatServer(("127.0.0.1", 0), models, tokenizer, **options) as server, serving(server):
        yield server


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    import torchtune

    return torchtune.load(write_checkpoint(tmp_path_factory.mktemp("served") / "tiny"), device="cpu")


@pytest.fixture(scope="module")
def server(loaded):
    with running({"tiny": loaded[0]}, loaded[1]) as chat_server:
        yield chat_server


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_the_command_serves_adapters_of_one_base_until_it_is_interrupted(tmp_path, monkeypatch, capsys, request):
    checkpoint = write_checkpoint(tmp_path / "tiny")
    write_adapter(tmp_path / "one", checkpoint)
    write_adapter(tmp_path / "two", checkpoint, rank=3, init="pissa")  # changes the base weights under it
    expected = {"tiny": reference(checkpoint, ["the cat"])}
    expected |= {name: reference(checkpoint, ["the cat"], tmp_path / name) for name in ("one", "two")}
    adapters = [f"{name}={tmp_path / name}" for name in ("one", "two")]
    models, _ = _load(str(checkpoint), "tiny", Namespace(adapter=adapters, dtype=None, device="cpu"))
    base = set(map(id, models["tiny"].parameters()))
    adapter_names = {name for name, parameter in models["one"].named_parameters() if id(parameter) not in base}
    assert adapter_names
    assert all("lora_" in name for name in adapter_names)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    replies = {}

    def client():
        try:
            for _ in range(600):
                with closing(socket.socket()) as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            threads = [
                threading.Thread(target=lambda name=name: replies.update({name: content(port, CAT, name)}))
                for name in expected
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            replies["names"] = [model["id"] for model in ask(port, None, "/v1/models", "GET")[1]["data"]]
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    request.addfinalizer(lambda: [signal.signal(number, handler) for number, handler in before.items()])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = ["--port", str(port), "--device=cpu", *(f"--adapter={probe}" for probe in adapters)]
    monkeypatch.setattr("sys.argv", ["tune", "serve", str(checkpoint), *options])
    thread = threading.Thread(target=client)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        main()
    thread.join()
    assert ended.value.code == 130
    assert replies.pop("names") == ["tiny", "one", "two"]
    assert replies == expected
    assert len(set(expected.values())) == 3
    printed = capsys.readouterr()
    assert f"serving tiny, one, two at http://127.0.0.1:{port}/v1" in printed.out
    assert printed.err.endswith("interrupted\n")
    assert not any("_run" in thread.name for thread in threading.enumerate())


def test_port_that_cannot_be_used_is_refused(tmp_path, tune):
    checkpoint = write_checkpoint(tmp_path / "tiny")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        for port in (taken.getsockname()[1], 65536):
            done = tune("serve", checkpoint, "--device=cpu", "--port", port)
            assert (done.code, done.out) == (2, "")
            assert f"error: --port {port} cannot be used (" in done.err


def test_requests_share_a_batch_and_do_not_change_each_other(server):
    port = server.server_port
    texts = ["the cat", "a dog", "why", "one two", "red"]
    alone = [content(port, [{"role": "user", "content": text}]) for text in texts]
    replies = {}

    def one(number):
        sampled = {"temperature": 1.5, "seed": 7} if number % 2 else {}
        number //= 2
        body = {"messages": [{"role": "user", "content": texts[number]}], **sampled}
        replies[number, bool(sampled)] = content(port, **body)

    for _ in range(2):
        threads = [threading.Thread(target=one, args=(number,)) for number in range(2 * len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [replies[number, False] for number in range(len(texts))] == alone
        sampled = [replies[number, True] for number in range(len(texts))]
    assert sampled == [replies[number, True] for number in range(len(texts))]
    again = content(port, [{"role": "user", "content": texts[0]}], temperature=1.5, seed=7)
    assert again == sampled[0] != content(port, [{"role": "user", "content": texts[0]}], temperature=1.5, seed=8)


def test_a_stream_gives_the_same_text_and_the_usage(server, loaded):
    port = server.server_port
    tokenizer = loaded[1]
    text = content(port, CAT, max_tokens=9)
    body = {"model": "tiny", "messages": CAT, "temperature": 0, "max_completion_tokens": 9, "stream": True}
    status, events = ask(port, {**body, "stream_options": {"include_usage": True}})
    assert status == 200
    choices = [event["choices"][0] for event in events[:-1]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    prompt = tokenizer.tokenize_messages([*CAT, {"role": "assistant", "content": ""}], add_end_tokens=False)[0]
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 9
    assert usage["total_tokens"] == usage["prompt_tokens"] + 9
    assert usage["prompt_tokens"] == len(prompt)
    assert len({event["id"] for event in events}) == 1
    mark = text[len(text) // 2 :][:2]
    assert content(port, CAT, max_tokens=9, stop=["nowhere", mark]) == text.partition(mark)[0]


def test_a_session_keeps_what_was_sampled_and_its_log_probs(server, loaded):
    """Also after a truncated turn, a second continuation of a turn, and a history that the client changed."""
    model, tokenizer = loaded
    port = server.server_port
    messages = list(CAT)

    def turn(messages):
        body = {"model": "tiny", "messages": messages, "max_tokens": 5, "temperature": 1.3}
        reply = ask(port, body, **{"X-Session-Id": "episode 7/1"})[1]
        return {**reply["choices"][0]["message"], "refusal": None}

    for text in ("a dog", "why"):
        messages += [turn(messages), {"role": "user", "content": text}]
    messages.append(turn(messages))
    again = turn(messages[:-1])  # a second continuation of the turn before
    turn([*messages[:1], {"role": "assistant", "content": "no"}, messages[2]])
    reply = ask(port, None, "/v1/sessions/episode%207/1", "GET")[1]
    first, second, third = reply["samples"]
    answer = tokenizer.decode(first["tokens"][first["prompt_len"] :], skip_special_tokens=False)
    assert answer.count("<|im_start|>user") == 2
    assert sum(first["mask"]) <= 15
    assert second["mask"] == [True] * len(second["mask"])
    assert second["tokens"][: second["prompt_len"]] == first["tokens"][: second["prompt_len"]]
    new = tokenizer.decode(second["tokens"][second["prompt_len"] :])
    assert new.strip() == again["content"].strip()
    assert third["tokens"][: first["prompt_len"]] == first["tokens"][: first["prompt_len"]]
    conversation_text = tokenizer.decode(third["tokens"], skip_special_tokens=False)
    assert "assistant\nno<|im_end|>" in conversation_text
    # A truncated turn is closed by the template's token, which is not trained on.
    position = answer.index("<|im_start|>user")
    assert answer[:position].endswith("<|im_end|>\n")
    episodes = episodes_of(reply["samples"])
    assert [episode.turns for episode in episodes] == [3, 1, 1]
    batch = collate_rollouts(episodes, [1.0] * 3)
    with torch.no_grad():
        hidden = model(**batch.model_inputs(), output="hidden")
        recomputed = token_log_probs(hidden, batch.labels, model.output, 1.3)
    is_label = batch.labels != CROSS_ENTROPY_IGNORE_IDX
    assert int(is_label.sum()) == sum(sum(episode["mask"]) for episode in reply["samples"])
    torch.testing.assert_close(recomputed[is_label], batch.per_token["sampled"][is_label], rtol=0, atol=1e-5)
    assert ask(port, None, "/v1/sessions/episode%207/1", "DELETE")[1] == reply
    assert ask(port, None, "/v1/sessions/episode%207/1", "GET")[0] == 404


def test_sessions_that_were_not_used_for_longest_are_forgotten(loaded):
    """A request of a forgotten session is answered all the same, from its messages."""
    with running({"tiny": loaded[0]}, loaded[1]) as server:
        port = server.server_port
        server.sessions = Sessions(loaded[1], max_tokens=90)
        messages = [*CAT, {"role": "assistant", "content": content(port, CAT, session="a")}, *CAT]
        answer = content(port, messages, session="a")
        sizes = {"a": len(ask(port, None, "/v1/sessions/a", "GET")[1]["samples"][0]["tokens"])}
        for name in "bcb":
            content(port, CAT, session=name)
            samples_by_session = {}
            for session in "abc":
                reply = ask(port, None, f"/v1/sessions/{session}", "GET")[1]
                samples_by_session[session] = reply.get("samples", [])
                sizes[session] = sum(len(sample["tokens"]) for sample in samples_by_session[session])
            assert sum(sizes.values()) <= 90
        assert sizes["a"] == 0 < min(sizes["b"], sizes["c"])
        status, reply = ask(port, None, "/v1/sessions/a", "GET")
        assert (status, "1 sessions were forgotten to limit memory" in reply["error"]["message"]) == (404, True)
        assert content(port, messages, session="a") == answer
        assert len(ask(port, None, "/v1/sessions/a", "GET")[1]["samples"]) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0, "top_k": None},
        {"temperature": 1.0, "top_k": None, "top_p": 0.9},
        {"temperature": 1.0, "top_k": None, "response_format": "json_object"},
    ],
)
def test_samples_of_another_distribution_are_not_trained_on(sampling):
    sample = {"tokens": [5, 6], "prompt_len": 1, "mask": [True], "log_probs": [-0.1], "finished": True}
    with pytest.raises(RolloutError, match="need one temperature above 0, and the whole distribution"):
        episodes_of([{**sample, "sampling": [sampling]}])
    whole_distribution = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
    assert len(episodes_of([{**sample, "sampling": [whole_distribution]}])) == 1


class Script(nn.Module):
    """Output layer that lets the model write given tokens."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.tokens = []

    def forward(self, hidden):
        logits = hidden.new_zeros(*hidden.shape[:2], self.size)
        logits[..., self.tokens.pop(0)] = 40.0
        return logits


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("qwen2_5", False),
        ("qwen2_5", True),
        ("qwen3_5_think", True),
        ("nemotron_3_nano", False),
        ("llama3_1", True),
        ("gptoss", False),
        ("gemma4", True),
    ],
)
def test_tool_calls_are_parsed_and_their_replies_bridged(name, streams, tmp_path):
    tokenizer = make(name, tmp_path)
    turns = conversation(1, reasons=False)
    tokens, mask = tokenizer.tokenize_messages(turns, tools=TOOLS)
    start = mask.index(False)
    end = len(mask) - mask[::-1].index(False)  # behind the last token of an answer
    size = max(tokenizer.vocab_size, max(tokens) + 1)
    model = llama3(vocab_size=size, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=8, max_seq_len=8192)
    model.output = script = Script(size)
    stop = tokenizer.stop_tokens
    tool_format = detect_format((PUBLISHED / f"{name}.jinja").read_text())
    body = {"model": "m", "tools": TOOLS, "stream": streams, "session": "s", "max_tokens": 400}
    with running({"m": model.eval()}, tokenizer, tool_format=tool_format) as server:
        script.tokens = [*tokens[start:end], stop[0]]
        messages = [{"role": "user", "content": turns[0].text_content}]
        status, reply = ask(server.server_port, {**body, "messages": messages})
        assert status == 200, reply
        if streams:
            choices = [event["choices"][0] for event in reply]
            called = []
            text = ""
            for choice in choices:
                called += choice["delta"].get("tool_calls", ())
                text += choice["delta"].get("content", "")
            assert choices[-1]["finish_reason"] == "tool_calls"
        else:
            called, text = (reply["choices"][0]["message"][key] for key in ("tool_calls", "content"))
            assert reply["choices"][0]["finish_reason"] == "tool_calls"
        assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in called] == [
            (CALL.name, CALL.arguments)
        ]
        messages.append({"role": "assistant", "content": text, "tool_calls": called})
        messages.append({"role": "tool", "tool_call_id": called[0]["id"], "content": "Found 0 there", "name": "look"})
        script.tokens = [tokens[start]] * 2 + [stop[0]]
        status, reply = ask(server.server_port, {**body, "messages": messages, "tool_choice": "auto"})
        assert status == 200, reply
        (sample,) = ask(server.server_port, None, "/v1/sessions/s", "GET")[1]["samples"]
    expected = tokenizer.render_template(turns, add_generation_prompt=True, tools=TOOLS)
    sampled = [*tokens[start:end], stop[0]]
    position = sample["prompt_len"]
    sampled = sampled[: next(index for index, token in enumerate(sampled, 1) if token in stop)]
    assert sample["tokens"][position : position + len(sampled)] == sampled
    between = [token for token, mask in zip(sample["tokens"][position:], sample["mask"], strict=True) if not mask]
    text = tokenizer.decode(between, skip_special_tokens=False)
    assert "Found 0 there" in text
    assert expected.endswith(text)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "The body is not valid JSON"),
        ([], 400, "must be a JSON object"),
        ({"messages": []}, 400, "not in the format of the chat API"),
        ({"messages": [{"role": "judge", "content": "a"}]}, 400, "'judge' is not a role"),
        ({"messages": [*CAT, {"role": "assistant", "content": "so"}]}, 400, "end with the assistant's turn"),
        ({"messages": [{"role": "user", "content": "cat " * 5000}]}, 400, "fill the model's context"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            400,
            "an image",
        ),
        ({"top_p": 1.5}, 400, "top_p is 1.5: it must be a number between 0 and 1"),
        ({"min_p": -1}, 400, "min_p is -1: it must be a number between 0 and 1"),
        ({"frequency_penalty": 1}, 400, "samples without frequency_penalty other than 0"),
        ({"n": 0}, 400, "n is 0: it must be an integer between 1 and 128"),
        ({"n": 129}, 400, "between 1 and 128"),
        ({"logprobs": 5}, 400, "logprobs must be true or false"),
        ({"top_logprobs": 3}, 400, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "between 0 and 20"),
        ({"response_format": "json"}, 400, "response_format must be an object"),
        ({"response_format": {"type": "xml"}}, 400, "must be 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, 400, "json_schema must be an object with a name and a schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"properties": {"b": {"type": "string", "pattern": "c"}}}},
                }
            },
            400,
            "response_format: #/properties/b has 'pattern', which is not supported",
        ),
        ({"stop": ["a"] * 17}, 400, "stop has 17 texts of up to 1 characters: give at most 16"),
        ({"stop": "a" * 1_000_000}, 400, "stop has 1 texts of up to 1,000,000 characters"),
        ({"best_of": 2}, 400, "samples without best_of: leave it out"),
        ({"temperature": "hot"}, 400, 'temperature is "hot": it must be a number of at least 0'),
        ({"model": ["tiny"]}, 400, "model must be a text"),
        ({"stop": 5}, 400, "stop must be a text, or a list of texts"),
        ({"stream_options": 5}, 400, "stream_options must be an object"),
        ({"max_tokens": 0}, 400, "max_tokens is 0: it must be an integer of at least 1"),
        ({"tools": TOOLS}, 400, "start tune serve with --tool-format"),
        ({"tool_choice": "required"}, 400, "no call can be forced"),
    ],
)
def test_invalid_fields_of_a_request_are_named(body, status, said, server):
    body = {"model": "tiny", "messages": CAT, **body} if isinstance(body, dict) else body
    reply_status, reply = ask(server.server_port, body)
    assert reply_status == status
    assert said in reply["error"]["message"]


def test_invalid_requests_are_refused(server, loaded):
    port = server.server_port
    handle = loaded[0].register_forward_pre_hook(lambda *_: 1 / 0)
    status, reply = ask(port, {"model": "tiny", "messages": CAT})
    handle.remove()
    assert (status, reply["error"]["message"]) == (503, "The model failed: division by zero")
    assert ask(port, {}, "/v1/embeddings")[0] == 404
    assert ask(port, None, "/v1/nothing", "GET")[0] == 404
    assert ask(port, None, "/v1/models", "GET", Host="localhost.example")[0] == 403
    status, reply = ask(port, b" " * 17 * 2**20)
    assert status == 413
    assert "The body has 17,825,792 bytes" in reply["error"]["message"]
    job = Job("tiny", [5], 4, has_left=lambda: True)
    assert server.batch.submit(job)
    with pytest.raises(GenerationError, match="The client has closed the connection"):
        list(job)
    assert content(port, CAT, temperature=1e-300) == content(port, CAT), "nothing divides by it"
    assert content(port, CAT, top_p=1, n=1, frequency_penalty=0, user="me"), "neutral values are accepted"


def test_a_name_of_a_model_is_needed_only_among_several(server, loaded):
    status, reply = ask(server.server_port, {"model": "gpt-4o-mini", "messages": CAT, "max_tokens": 1})
    assert (status, reply["model"]) == (200, "tiny")
    assert ask(server.server_port, {"messages": CAT, "max_tokens": 1})[1]["model"] == "tiny"
    with running({"tiny": loaded[0], "small": loaded[0]}, loaded[1]) as several:
        status, reply = ask(several.server_port, {"model": "other", "messages": CAT})
    assert (status, reply["error"]["message"]) == (404, "There is no model 'other': the models are tiny, small.")


@pytest.mark.parametrize("streams", [True, False])
def test_log_probs_are_those_of_a_forward_pass(streams, server, loaded):
    model, tokenizer = loaded
    body = {"messages": CAT, "max_tokens": 5, "seed": 3, "logprobs": True, "top_logprobs": 3, "session": f"p{streams}"}
    status, reply = ask(server.server_port, {**body, "stream": streams})
    assert status == 200
    if streams:
        content = []
        text = ""
        for event in reply:
            for choice in event["choices"]:
                text += choice["delta"].get("content", "")
                if choice["logprobs"]:
                    content += choice["logprobs"]["content"]
                # Log-probs come with the text of their tokens, and no other chunk has any.
                assert (choice["logprobs"] is not None) == ("content" in choice["delta"])
    else:
        content = reply["choices"][0]["logprobs"]["content"]
        text = reply["choices"][0]["message"]["content"]
    (sample,) = ask(server.server_port, None, f"/v1/sessions/p{streams}", "GET")[1]["samples"]
    sampled = [token for token in sample["tokens"][sample["prompt_len"] :] if token not in tokenizer.stop_tokens]
    assert len(content) == len(sampled) > 0
    tokens = torch.tensor([sample["tokens"]])
    with torch.no_grad():
        expected = model(tokens, output="logits")[0, sample["prompt_len"] - 1 : -1].log_softmax(-1)
    for position, (token, entry) in enumerate(zip(sampled, content, strict=True)):
        assert entry["logprob"] == pytest.approx(expected[position, token].item(), abs=1e-4)
        assert [candidate["logprob"] for candidate in entry["top_logprobs"]] == pytest.approx(
            expected[position].topk(3).values.tolist(), abs=1e-4
        )
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
    if all(entry["bytes"] for entry in content):
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text


def test_request_for_several_answers_samples_each(server):
    body = {"messages": CAT, "max_tokens": 6, "seed": 5, "n": 3, "temperature": 1.5}
    reply = ask(server.server_port, body)[1]
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    alone = ask(server.server_port, {**body, "n": 1})[1]
    assert alone["choices"][0]["message"]["content"] == texts[0]
    assert reply["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert reply["usage"]["completion_tokens"] > alone["usage"]["completion_tokens"]
    _, events = ask(server.server_port, {**body, "stream": True, "stream_options": {"include_usage": True}})
    streamed = ["", "", ""]
    ends = []
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                ends.append(choice["index"])
    assert (streamed, sorted(ends)) == (texts, [0, 1, 2])
    assert events[-1]["usage"] == reply["usage"]
    assert content(server.server_port, CAT, top_p=0.0, temperature=1) == content(server.server_port, CAT)
    assert content(server.server_port, CAT, min_p=1.0, temperature=1) == content(server.server_port, CAT)


def test_answers_are_json_of_the_schema(server):
    # Random weights write random text: what comes out is JSON because nothing else can.
    schema = {
        "type": "object",
        "properties": {"big": {"type": "boolean"}, "size": {"enum": ["S", "M"]}, "note": {"type": "null"}},
        "required": ["big", "size"],
        "additionalProperties": False,
    }
    body = {"messages": CAT, "temperature": 2.0, "max_tokens": 400}
    described = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema, "strict": True}}
    for seed in range(4):
        reply = ask(server.server_port, {**body, "seed": seed, "response_format": described})[1]
        answer = json.loads(reply["choices"][0]["message"]["content"])
        assert answer.keys() - {"note"} == {"big", "size"}
        assert answer["big"] in (True, False)
        assert answer["size"] in ("S", "M")
        assert answer.get("note") is None
        assert reply["choices"][0]["finish_reason"] == "stop"
    reply = ask(server.server_port, {**body, "seed": 0, "response_format": {"type": "json_object"}})[1]
    (choice,) = reply["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].startswith("{")


def test_stop_texts_are_found_across_pieces_in_one_pass():
    def answered(text, marks, size):
        buffer = _MarkBuffer(marks, None)
        sent = ""
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            sent += buffer.put(piece, piece)
        if buffer.mark:
            return sent + buffer.text_before, buffer.mark
        return sent + buffer.text, None

    for size in (1, 2, 3, 50):
        assert answered("a long tail and more", ["tail"], size) == ("a long ", "tail")
        assert answered("aaaab", ["aab"], size) == ("aa", "aab")
        assert answered("ababac", ["abac"], size) == ("ab", "abac")
        assert answered("no such text", ["texts"], size) == ("no such text", None)
        assert answered("x END y", ["y", "END"], size) == ("x ", "END")
    # A long stop text that the answer repeats almost to its end, token by token.
    mark = "a" * 4000 + "b"
    started = time.perf_counter()
    assert answered("a" * 100_000, [mark] * 4, 4) == ("a" * 100_000, None)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("streams", [True, False])
def test_full_queue_is_refused_and_a_closed_connection_ends_its_answer(streams, loaded):
    model, tokenizer = loaded
    begun, go = threading.Event(), threading.Event()

    def hold(*_):
        begun.set()
        go.wait(60)

    with running({"tiny": model}, tokenizer, max_sequences=1, max_waiting=1, max_new_tokens=4000) as server:
        port = server.server_port
        body = {"model": "tiny", "messages": CAT, "temperature": 2.0, "stream": streams}
        handle = model.register_forward_pre_hook(hold)
        leaver = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        leaver.request("POST", "/v1/chat/completions", json.dumps(body))
        assert begun.wait(60)
        replies = {}
        waiter = threading.Thread(target=lambda: replies.update(answer=content(port, CAT)))
        waiter.start()
        for _ in range(200):
            if server.batch._waiting:
                break
            time.sleep(0.05)
        status, reply = ask(port, {**body, "stream": False, "max_tokens": 1})
        assert (status, reply["error"]["code"]) == (503, "overloaded")
        leaver.close()
        handle.remove()
        steps = []
        handle = model.register_forward_pre_hook(lambda *_: steps.append(1))
        go.set()
        waiter.join(60)
        handle.remove()
        assert replies["answer"]
        assert len(steps) < 50, "of an answer of up to 4,000 tokens"


@pytest.mark.parametrize(("error", "is_printed"), [(BrokenPipeError(), False), (ValueError("own"), True)])
def test_traceback_is_printed_unless_the_client_has_left(error, is_printed, capsys):
    try:
        raise error
    except (OSError, ValueError):
        ChatServer.handle_error(ChatServer.__new__(ChatServer), None, ("127.0.0.1", 1))
    assert ("Traceback" in capsys.readouterr().err) is is_printed
