"""Environments of other libraries: a server of OpenEnv's interface over HTTP, and the packages that are installed."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.serving import serving
from torchtune.rlhf import RolloutError
from torchtune.rlhf.environments import Gymnasium, OpenEnv, TextArena, check_call, parameters_of, parse_calls, tools_of
from torchtune.utils import UserError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class _Handler(BaseHTTPRequestHandler):
    """Counter for each session, with OpenEnv's JSON-RPC methods."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params, counters = body["params"], self.server.counters
        session = params.get("session_id")
        result: Any = None
        if body["method"] == "tools/list":
            result = {"tools": [{"name": "add", "description": "Add to the counter.", "inputSchema": SCHEMA}]}
        elif body["method"] == "openenv/session/create" and self.server.has_room:
            result = {"session_id": f"s{len(counters)}"}
            counters[result["session_id"]] = 0
        elif body["method"] == "openenv/session/close":
            result = {"closed": counters.pop(session) is not None}
        elif body["method"] == "tools/call":
            counters[session] += params["arguments"]["a"]
            result = {"data": counters[session], "content": [{"type": "text", "text": "unused"}]}
        reply = {"error": {"message": "no room"}} if result is None else {"result": result}
        data = json.dumps({"jsonrpc": "2.0", "id": body["id"], **reply}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as found:
        found.counters, found.has_room = {}, True
        with serving(found):
            yield found


def test_an_openenv_server_has_a_session_for_each_episode(server):
    one, two = (OpenEnv(f"http://127.0.0.1:{server.server_port}/") for _ in range(2))
    one.reset()
    two.reset()
    schemas = parameters_of(tools_of(one))
    (call,) = parse_calls('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>', "hermes", schemas)
    assert check_call(call, schemas) is None
    assert [getattr(environment, call.name)(**call.arguments) for environment in (one, one, two)] == [2, 4, 2]
    assert not hasattr(one, "multiply")
    assert not hasattr(one, "get_reward")
    one.close()
    assert list(server.counters) == ["s1"]
    server.has_room = False
    with pytest.raises(RolloutError, match=r"/mcp replies to openenv/session/create with .*no room"):
        one.reset()


@pytest.mark.parametrize("kind", [Gymnasium, TextArena])
def test_a_missing_package_is_named_with_its_extra(kind, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, kind.__name__.lower(), None)
    with pytest.raises(UserError, match=rf"pip install 'torchtune\[{kind.__name__.lower()}\]'"):
        kind("any")


def test_gymnasium_adds_up_rewards_until_the_end():
    pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")
    lake = Gymnasium("FrozenLake-v1", is_slippery=False)
    assert "[S]FFF" in lake.reset(seed=2**40)
    assert "is no action" in lake.act("7")
    assert "is no action" in lake.act("left")
    for action in "112122":
        assert not lake.done
        text = lake.act(action)
    assert "HFF[G]" in text
    assert lake.done
    assert lake.get_reward() == 1.0
    lake.close()


def test_textarena_gives_the_reward_of_the_game():
    pytest.importorskip("textarena", reason="the extra textarena is not installed")
    game = TextArena("GuessTheNumber-v0")
    assert "number between 1 and 20" in game.reset(seed=5)
    low, high = 1, 20
    while not game.done:
        text = game.act(f"[{(low + high) // 2}]")
        low, high = ((low + high) // 2 + 1, high) if "higher" in text else (low, (low + high) // 2 - 1)
    assert game.get_reward() == 1.0
