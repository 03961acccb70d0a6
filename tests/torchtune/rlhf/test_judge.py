"""Rewards by a language model behind HTTP, against a real server of this machine."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from tests.serving import serving
from torchtune.rlhf import RewardSum, RolloutError
from torchtune.rlhf.reward_functions import JudgeReward

PROMPT = "Question: {question} Answer: {text}. Give 0 to 10."


class Judge(BaseHTTPRequestHandler):
    """Speaks as much of the chat interface as is asked of it; the name of the model says what goes wrong."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, **body})
        said = {"choices": [{"message": {"content": "Score: 7.5" if "yes" in str(body) else "I cannot say."}}]}
        if body["model"] == "slow":
            time.sleep(1.0)
        status = 404 if body["model"] == "other" else 200
        text = {"html": "<html>", "empty": "{}", "other": "no model 'other' here"}.get(body["model"], json.dumps(said))
        with suppress(BrokenPipeError):  # the client had no time to wait
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server, serving(server):
        yield f"http://127.0.0.1:{server.server_port}/v1"


def test_a_judge_scores_and_what_it_cannot_score_is_none(url):
    judge = JudgeReward(url, "good", PROMPT, scale=10.0)
    assert judge([{"question": "Really?"}] * 2, ["yes", "no"]) == [0.75, None]
    assert Judge.asked[-2]["path"] == "/v1/chat/completions"
    assert Judge.asked[-2]["messages"][0]["content"] == "Question: Really? Answer: yes. Give 0 to 10."


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("slow", "has not answered within 0.2 s"),
        ("other", "with 404 Not Found: no model 'other' here"),
        ("html", "is no JSON"),
        ("empty", "without choices"),
    ],
)
def test_a_server_that_fails_is_one_sentence_with_the_row(url, model, said):
    judge = JudgeReward(url, model, PROMPT, timeout=0.2 if model == "slow" else 60.0)
    with pytest.raises(RolloutError, match=rf"'JudgeReward' fails for row 8: .*{said}"):
        RewardSum([judge])([{"question": "?"}], ["yes"], [8])


def test_a_judge_that_is_slow_is_asked_once(url):
    """Not once more for each answer, to say which row it was: with a timeout of minutes that would be hours."""
    with pytest.raises(RolloutError, match=r"fails for rows 1, 2: .*has not answered"):
        RewardSum([JudgeReward(url, "slow", PROMPT, timeout=0.2)])([{"question": "Once?"}] * 2, ["yes", "no"], [1, 2])
    assert sum("Once?" in str(body) for body in Judge.asked) <= 1


def test_a_server_that_is_gone_is_one_sentence():
    with pytest.raises(RolloutError, match="No server answers at http://127"):
        RewardSum([JudgeReward("http://127.0.0.1:9/v1", "m", PROMPT)])([{"question": "?"}], ["yes"])
    with pytest.raises(RolloutError, match="the prompt names 'question', which is no column"):
        RewardSum([JudgeReward("http://127.0.0.1:9/v1", "m", PROMPT)])([{}], ["yes"])
