"""Environments of other libraries: a server of OpenEnv's interface over HTTP, and the packages that are installed."""

import json
import sys
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from tests.serving import JSONHandler, serving
from torchtune.rlhf import RolloutError
from torchtune.rlhf.environments import (
    Gymnasium,
    OpenEnv,
    OpenEnvGym,
    TextArena,
    check_call,
    parameters_of,
    parse_calls,
    tools_of,
)
from torchtune.utils import UserError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class _Handler(JSONHandler):
    """Counter for each session, with OpenEnv's JSON-RPC methods."""

    def do_POST(self) -> None:
        body = self.read_json()
        params = body["params"]
        counters = self.server.counters
        session = params.get("session_id")
        result = None
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
        self.reply({"jsonrpc": "2.0", "id": body["id"], **reply})


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as openenv_server:
        openenv_server.counters = {}
        openenv_server.has_room = True
        with serving(openenv_server):
            yield openenv_server


def test_an_openenv_server_has_a_session_for_each_episode(server):
    first, second = (OpenEnv(f"http://127.0.0.1:{server.server_port}/") for _ in range(2))
    first.reset()
    second.reset()
    schemas = parameters_of(tools_of(first))
    (call,) = parse_calls('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>', "hermes", schemas)
    assert check_call(call, schemas) is None
    assert [getattr(environment, call.name)(**call.arguments) for environment in (first, first, second)] == [2, 4, 2]
    assert not hasattr(first, "multiply")
    assert not hasattr(first, "get_reward")
    first.close()
    assert list(server.counters) == ["s1"]
    server.has_room = False
    with pytest.raises(RolloutError, match=r"/mcp replies to openenv/session/create with .*no room"):
        first.reset()


class _GymHandler(JSONHandler):
    """Schema of the actions, as OpenEnv 0.10 replies."""

    def do_GET(self) -> None:
        action = {"properties": {"metadata": {"type": "object"}, "number": {"type": "integer"}}, "required": ["number"]}
        self.reply({"action": action})

    do_HEAD = do_GET


def test_openenv_gym_sends_steps_and_adds_up_rewards(monkeypatch):
    """Messages of OpenEnv 0.10, over a socket that the test replaces: the format of the reply is what is tested."""
    replies = [
        {"observation": {"metadata": {}, "text": "From 1 to 9."}, "reward": None, "done": False},
        {"observation": {"text": "higher"}, "reward": -0.25, "done": False},
        {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [{"msg": "Field required"}]},
        {"observation": {"text": "right"}, "reward": 1, "done": True},
        {"message": "gone", "code": "EXECUTION_ERROR"},
    ]
    sent = []
    messages = []
    for data in replies:
        messages.append({"type": "error" if "code" in data else "observation", "data": data})
    urls = []
    socket = SimpleNamespace(send=sent.append, close=replies.clear)
    socket.recv = lambda timeout: json.dumps(messages[len(sent) - 1])
    client = SimpleNamespace(connect=lambda url, open_timeout: urls.append(url) or socket)
    monkeypatch.setitem(sys.modules, "websockets.sync.client", client)
    with ThreadingHTTPServer(("127.0.0.1", 0), _GymHandler) as server, serving(server):
        game = OpenEnvGym(f"http://127.0.0.1:{server.server_port}/")
        assert parameters_of(tools_of(game))["act"]["properties"] == {"number": {"type": "integer"}}
        assert game.reset(seed=2**31 + 4, low=1) == '{"text": "From 1 to 9."}'
        assert urls == [f"ws://127.0.0.1:{server.server_port}/ws"]
    assert game.act(number=2) == '{"text": "higher"}'
    assert game.act(count=2) == '["Field required"]'
    assert not game.done
    game.act(number=5)
    assert (game.done, game.get_reward()) == (True, 0.75)
    with pytest.raises(RolloutError, match=r"replies to step with .*gone"):
        game.act(number=5)
    assert json.loads(sent[0]) == {"type": "reset", "data": {"seed": 4, "low": 1}}
    assert json.loads(sent[1]) == {"type": "step", "data": {"number": 2}}
    game.close()
    assert not replies


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [
        (Gymnasium, "gymnasium", "gymnasium"),
        (TextArena, "textarena", "textarena"),
        (OpenEnvGym, "websockets", "openenv"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(kind, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs the package '{package}'.*pip install 'torchtune\[{extra}\]'"):
        kind("any")


def test_gymnasium_adds_up_rewards_until_the_end():
    pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")
    lake = Gymnasium("FrozenLake-v1", is_slippery=False)
    assert "[S]FFF" in lake.reset(seed=2**40)
    assert "is not an action" in lake.act("7")
    assert "is not an action" in lake.act("left")
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
    low = 1
    high = 20
    while not game.done:
        guess = (low + high) // 2
        text = game.act(f"[{guess}]")
        if "higher" in text:
            low = guess + 1
        else:
            high = guess - 1
    assert game.get_reward() == 1.0
