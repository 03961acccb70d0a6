"""Replies of servers that are wrong, endless or slow: each is one sentence, in the time that was given."""

import http.client
import json
import math
import socketserver
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.serving import serving
from tests.tiny import write_tokenizer
from torchtune.rlhf import RewardSum, Rollout, RolloutError
from torchtune.rlhf._servers import RequestSettings, TransformersServer, VLLMServer
from torchtune.rlhf.reward_functions import JudgeReward

SETTINGS = RequestSettings(
    max_new_tokens=4, temperature=1.0, stop_tokens=[2], vocab_size=300, timeout=20.0, weights_timeout=20.0
)
OK = b"HTTP/1.1 200 OK\r\n"
PROMPT = [1, 70]


class Replies(socketserver.ThreadingTCPServer):
    """Sends the bytes of ``pieces`` to whoever asks, ``pause`` seconds after each."""

    daemon_threads = True
    block_on_close = False
    pieces: Any = ()
    pause = 0.0
    asked: tuple[str, Any] = ("", None)  # the last path and body
    count = 0  # of requests

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def say(self, content):
        """Reply with JSON, with a text that may be none, or with the bytes of a whole reply."""
        body = content if isinstance(content, str | bytes) else json.dumps(content)
        if isinstance(body, str):
            body = OK + b"Content-Length: %d\r\n\r\n" % len(body.encode()) + body.encode()
        self.pieces = [body]
        self.pause = 0.0


class _Handler(socketserver.BaseRequestHandler):
    def handle(self):
        with suppress(OSError):  # the client has heard enough
            with self.request.makefile("rb") as asked:  # all of it: what is not read resets the connection at its end
                path = asked.readline().decode().split()[1]
                headers = http.client.parse_headers(asked)
                body = asked.read(int(headers.get("Content-Length", 0)))
            self.server.asked = path, json.loads(body or "null")
            self.server.count += 1
            for piece in self.server.pieces:
                self.request.sendall(piece)
                time.sleep(self.server.pause)


@pytest.fixture(scope="module")
def server():
    with Replies(("127.0.0.1", 0), _Handler) as replies, serving(replies):
        yield replies


def choice(**changes):
    log_probs = {"token_logprobs": changes.pop("log_probs", [-1.0, -0.5])}
    right = {
        "index": 0,
        "token_ids": [5, 2],
        "prompt_token_ids": PROMPT,
        "logprobs": log_probs,
        "finish_reason": "stop",
    }
    return {**right, **changes}


def test_a_valid_reply_becomes_a_rollout(server):
    server.say({"model": "m", "choices": [choice(index=1, token_ids=[6, 2]), choice(log_probs=[1e-5, 0])]})
    first, second = VLLMServer(server.url, "m", SETTINGS).sample(PROMPT, 2, 3)
    assert (first.answer, second.answer) == ([5, 2], [6, 2])
    assert first.finished
    torch.testing.assert_close(first.log_probs, torch.tensor([1e-5, 0.0], device="cpu"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"choices": [' + "9" * 5000 + "]}", "is not JSON"),
        ("", "is not JSON"),
        (None, "without choices"),
        ({"model": "m", "choices": None}, "without choices"),
        ({"model": "m", "choices": []}, "gave 0 answers instead of 1"),
        ({"model": 7, "choices": [choice()]}, "answers with the model 7, not with 'm'"),
        (choice(index="0"), "does not number its answers"),
        (choice(token_ids="52"), "without token ids and a log-prob for each"),
        (choice(token_ids=[5]), "without token ids and a log-prob for each"),
        (choice(token_ids=[True, 2]), "True is not a token id below 300"),
        (choice(token_ids=[-100, 2]), "-100 is not a token id below 300"),
        (choice(token_ids=[10**30, 2]), "1000000000000000000000000000000 is not a token id"),
        (choice(token_ids=[[5], [2]]), "a list is not a token id"),
        (choice(token_ids=[5] * 5, log_probs=[-1.0] * 5), "an answer of 5 tokens, and max_new_tokens is 4"),
        (choice(logprobs=[1, 2]), "without token ids and a log-prob for each"),
        (choice(log_probs=[-1.0, None]), "without token ids and a log-prob for each"),
        (choice(log_probs=["-1", -1.0]), "the log-prob '-1', which is not a number"),
        (choice(log_probs=[math.nan, -1.0]), "the log-prob nan, which is not a number from -9999 to 0"),
        (choice(log_probs=[-9999.0, -1.0]), "the log-prob -9999.0, which is not a number"),
        (choice(log_probs=[-(10**400), -1.0]), "which is not a number"),
        (choice(log_probs=[0.7, -1.0]), "the log-prob 0.7, which is not a number"),
        (choice(prompt_token_ids=[9]), "other tokens than this model"),
    ],
)
def test_an_invalid_reply_is_refused_in_one_sentence(server, content, said):
    if isinstance(content, dict) and "choices" not in content:
        content = {"model": "m", "choices": [content]}
    server.say("null" if content is None else content)
    with pytest.raises(RolloutError) as caught:
        VLLMServer(server.url, "m", SETTINGS).sample(PROMPT, 1, 3)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("data", [None, 3, "m", [None, {"id": ["m"]}]])
def test_an_invalid_list_of_models_is_refused(server, data):
    server.say({"data": data})
    with pytest.raises(RolloutError, match="serves no model, not 'm'"):
        VLLMServer(server.url, "m", SETTINGS).check()


@pytest.mark.parametrize(
    ("text", "usage", "said"),
    [
        ("a", None, "does not say how many tokens"),
        ("a", ["2", 1], "does not say how many tokens"),
        ("a", [2, 1.5], "does not say how many tokens"),
        ("a", [2, -1], "does not say how many tokens"),
        ("a", [2, 9], "an answer of 9 tokens, and max_new_tokens is 4"),
        ("a", [3, 1], "reads 3 tokens instead of the prompt's 2"),
        (None, [2, 1], "without a text, its text is None"),
    ],
)
def test_an_invalid_text_reply_is_refused_in_one_sentence(server, text, usage, said, tmp_path):
    write_tokenizer(tmp_path)
    asks = TransformersServer(server.url, "m", SETTINGS, tmp_path / "tokenizer.json", 2)
    counts = dict(zip(("prompt_tokens", "completion_tokens"), usage, strict=False)) if usage else usage
    server.say({"model": "m", "choices": [{"text": text, "finish_reason": "stop"}], "usage": counts})
    with pytest.raises(RolloutError, match=said):
        asks.sample(PROMPT, 1, 3)
    server.say({"model": "m", "choices": [{"text": "\ud800"}], "usage": {"prompt_tokens": 2, "completion_tokens": 2}})
    assert asks.sample(PROMPT, 1, 3)[0].answer == [], "half a character is dropped"


@pytest.mark.parametrize(
    ("text", "num_sampled", "reason", "answer", "is_finished"),
    [
        ("a?!!", 4, "length", ["a", "?", "!", "!"], False),
        ("a?", 3, "stop", ["a", "?", "<|im_end|>"], True),
        ("a?!", 4, "stop", ["a", "?", "!", "<|im_end|>"], True),
        ("a?!", 4, "length", [], False),
        ("a?", 4, "stop", [], False),
    ],
    ids=["cut", "ended", "ended at the limit", "cut, or ended at the limit", "other tokens"],
)
def test_an_answer_without_known_tokens_is_dropped(server, text, num_sampled, reason, answer, is_finished, tmp_path):
    """``transformers serve`` says ``length`` of every answer with the maximum number of tokens."""
    write_tokenizer(tmp_path)
    asks = TransformersServer(server.url, "m", SETTINGS, tmp_path / "tokenizer.json", 2)
    usage = {"prompt_tokens": 2, "completion_tokens": num_sampled}
    server.say({"model": "m", "choices": [{"text": text, "finish_reason": reason}], "usage": usage})
    (rollout,) = asks.sample(PROMPT, 1, 3)
    tokens = [asks._tokenizer.id_to_token(token) for token in rollout.answer]
    assert (tokens, rollout.finished) == (answer, is_finished)


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([OK + b"\r\n"] + [b" " * 2**20] * 64, "replies with more than"),
        ([CHUNKED + b"-1\r\n"] + [b" " * 2**20] * 64, "replies with more than"),
        ([OK + b"Content-Length: 1000000000000\r\n\r\n{}"], "broke"),
        ([OK + b"Content-Length: 99\r\n\r\n" + json.dumps({"model": "m"}).encode()], "broke"),
        ([CHUNKED + b"zz\r\n"], "broke"),
        ([b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\n\r\n"], "with 302 Found"),
        ([b"HTTP/1.1 301 Found\r\nLocation: file:///etc/passwd\r\n\r\n"], "with 301 Found"),
        ([b"HTTP/1.1 500 " + b"x" * 50_000 + b"\r\n\r\n"], "with 500 xxx"),
        ([b""], "broke"),
    ],
)
def test_a_reply_beyond_the_size_limit_is_refused(server, pieces, said):
    server.pieces = pieces
    server.pause = 0.0
    with pytest.raises(RolloutError) as caught:
        VLLMServer(server.url, "m", SETTINGS).sample(PROMPT, 1, 3)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("begin", [OK + b"Content-Length: 9999\r\n\r\n", CHUNKED + b"fff\r\n"])
def test_a_slow_reply_ends_with_the_timeout_and_is_requested_once(server, begin):
    """Not once more for each answer, to say which row it was: with a timeout of minutes that would be hours."""
    server.pieces = [begin, *[b"H"] * 600]
    server.pause = 0.1
    server.count = 0
    judge = JudgeReward(server.url, "m", "{text}", timeout=0.5)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"fails for rows 1, 2: .*has not answered within 0.5 s"):
        RewardSum([judge])([{}] * 2, ["yes", "no"], [1, 2])
    assert time.monotonic() - started < 30, "the drip goes on for a minute"
    assert server.count == 1


def said(text):
    return {"choices": [{"message": {"content": text}}]}


QUESTION = "Question: {question} Answer: {text}. Give 0 to 10."


def test_a_verdict_without_a_score_drops_the_answer(server):
    judge = JudgeReward(server.url, "good", QUESTION, scale=10.0)
    for text, score in (("Score: 7.5", 0.75), ("I cannot say.", None)):
        server.say(said(text))
        assert judge([{"question": "Really?"}], ["yes"]) == [score]
    path, body = server.asked
    assert (path, body["model"]) == ("/v1/chat/completions", "good")
    assert body["messages"][0]["content"] == "Question: Really? Answer: yes. Give 0 to 10."


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (said(7), "replies with a int instead of a text"),
        ("<html>", "is not JSON"),
        ({}, "without choices"),
        (b"HTTP/1.1 404 Not Found\r\n\r\nno model 'm' here", "with 404 Not Found: no model 'm' here"),
    ],
)
def test_errors_of_a_judge_name_the_row(server, content, words):
    server.say(content)
    with pytest.raises(RolloutError, match=rf"'JudgeReward' fails for row 8: .*{words}"):
        RewardSum([JudgeReward(server.url, "m", "{text}")])([{}], ["yes"], [8])


def test_an_unreachable_judge_and_a_missing_column_are_refused():
    judge = RewardSum([JudgeReward("http://127.0.0.1:9/v1", "m", QUESTION)])
    with pytest.raises(RolloutError, match="No server answers at http://127"):
        judge([{"question": "?"}], ["yes"])
    with pytest.raises(RolloutError, match="the prompt names 'question', which is not a column"):
        judge([{}], ["yes"])


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.5])
def test_log_probs_of_a_user_sampler_are_checked(value):
    with pytest.raises(RolloutError, match="a log-prob is a finite number up to 0"):
        Rollout(torch.tensor([1, 5, 2]), 1, torch.tensor([value, -1.0]), True)
    with pytest.raises(RolloutError, match=r"an answer of 2 tokens log-probs of shape \[1\]"):
        Rollout(torch.tensor([1, 5, 2]), 1, torch.tensor([-1.0]), True)
    for tokens in (torch.tensor([1, 4.5]), torch.tensor([1, -100]), torch.tensor([[1, 2]])):
        with pytest.raises(RolloutError, match="tokens that are not token ids"):
            Rollout(tokens, 1, None, True)
