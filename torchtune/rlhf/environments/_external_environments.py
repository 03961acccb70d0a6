"""Environments from other libraries; each requires a package or a server."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torchtune.rlhf._rollouts import RolloutError
from torchtune.rlhf._servers import post_json
from torchtune.utils import require

_NUM_SEEDS = 2**31  # these libraries take seeds of 32 bits with a sign, seeds of episodes have 64


class OpenEnv:
    """Environment on an OpenEnv server with MCP tools, over HTTP; its packages stay in the server's process.

    Every episode has its session on the server. The environment gives no reward: set ``rewards``. Tested with OpenEnv
    0.10.

    Args:
        url: URL of the server.
        timeout: maximum seconds for a request.

    Raises:
        RolloutError: the server is unreachable, or replies with an error.

    Example:
        >>> environment = torchtune.rlhf.environments.OpenEnv("http://localhost:8000")  # doctest: +SKIP
    """

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        self._url = f"{url.rstrip('/')}/mcp"
        self._timeout = timeout
        self._session: dict[str, str] = {}  # parameters of requests in a session
        self._tools = self._request("tools/list")["tools"]

    def _request(self, method: str, **params: Any) -> Any:
        """Call a JSON-RPC method of the server, and return its result."""
        params |= self._session
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        reply = post_json(self._url, body, timeout=self._timeout)
        if not isinstance(reply, Mapping) or reply.get("result") is None:
            raise RolloutError(f"{self._url} replies to {method} with {str(reply)[:300]}, which is not a result.")
        return reply["result"]

    def reset(self) -> None:
        """Begin a session."""
        self._session = {"session_id": self._request("openenv/session/create")["session_id"]}

    def tools(self) -> list[dict[str, Any]]:
        """Return the definitions of the server's tools."""
        definitions = []
        for tool in self._tools:
            # MCP calls it inputSchema, servers in Python input_schema.
            parameters = tool.get("inputSchema") or tool.get("input_schema") or {}
            description = tool.get("description") or ""
            function = {"name": tool["name"], "description": description, "parameters": parameters}
            definitions.append({"type": "function", "function": function})
        return definitions

    def __getattr__(self, name: str) -> Any:
        """Return the function that calls a tool of the server."""
        if name.startswith("_") or all(tool["name"] != name for tool in self._tools):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, tool: str, **arguments: Any) -> Any:
        """Call a tool, and return its structured data if the server gives some, otherwise the whole result."""
        result = self._request("tools/call", name=tool, arguments=arguments)
        if isinstance(result, Mapping) and "data" in result:
            return result["data"]
        return result

    def close(self) -> None:
        """End the session."""
        if self._session:
            self._request("openenv/session/close")


class OpenEnvGym:
    """Environment on an OpenEnv server with Gym steps, over a WebSocket (extra ``openenv``), with the tool ``act``.

    The arguments of ``act`` are the fields of the server's actions. ``reset`` sends a seed and the columns of the row;
    the server ignores columns that its environment does not know. Tested with OpenEnv 0.10.

    Args:
        url: URL of the server.
        timeout: maximum seconds for a request.

    Raises:
        UserError: the package is not installed.
        RolloutError: the server is unreachable.

    Example:
        >>> environment = torchtune.rlhf.environments.OpenEnvGym("http://localhost:8000")  # doctest: +SKIP
    """

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        self._client = require("websockets.sync.client", extra="openenv", purpose="OpenEnvGym")
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._socket = None
        self._reward = 0.0
        self.done = False
        self._action_schema = post_json(f"{self._url}/schema", None, timeout=timeout)["action"]

    def tools(self) -> list[dict[str, Any]]:
        """Return the definition of ``act``."""
        parameters = {**self._action_schema, "properties": _without_metadata(self._action_schema["properties"])}
        function = {"name": "act", "description": "Take an action.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def reset(self, seed: int, **row: Any) -> str:
        """Begin a session and an episode."""
        self._socket = self._client.connect(f"ws{self._url.removeprefix('http')}/ws", open_timeout=self._timeout)
        return self._send("reset", {"seed": seed % _NUM_SEEDS, **row})

    def act(self, **action: Any) -> str:
        """Take an action."""
        return self._send("step", action)

    def _send(self, kind: str, data: Mapping[str, Any]) -> str:
        """Send a message, note reward and end of the reply, and return its observation as JSON."""
        self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._socket.recv(timeout=self._timeout))
        if reply["type"] == "error":
            if kind == "step" and reply["data"].get("code") == "VALIDATION_ERROR":  # the model's mistake
                return json.dumps([error["msg"] for error in reply["data"]["errors"]])
            raise RolloutError(f"{self._url} replies to {kind} with {str(reply['data'])[:300]}.")
        self._reward += float(reply["data"]["reward"] or 0.0)
        self.done = reply["data"]["done"]
        return json.dumps(_without_metadata(reply["data"]["observation"]), ensure_ascii=False)

    def get_reward(self) -> float:
        """Return the sum of the rewards."""
        return self._reward

    def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            self._socket.close()


def _without_metadata(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an action or observation without OpenEnv's own field."""
    return {name: value for name, value in fields.items() if name != "metadata"}


class Gymnasium:
    """Text environment of ``gymnasium`` (extra ``gymnasium``), with the tool ``act``.

    Args:
        id: id of the environment, such as ``"FrozenLake-v1"``.
        **options: arguments of ``gymnasium.make``. With ``render_mode="ansi"``, the default, the model reads the
            rendered environment, otherwise the observation.

    Raises:
        UserError: the package is not installed.

    Example:
        >>> lake = torchtune.rlhf.environments.Gymnasium("FrozenLake-v1", is_slippery=False)  # doctest: +SKIP
    """

    def __init__(self, id: str, **options: Any) -> None:
        gymnasium = require("gymnasium", extra="gymnasium", purpose="Gymnasium")
        self._env = gymnasium.make(id, **{"render_mode": "ansi", **options})
        self._reward = 0.0
        self.done = False

    def reset(self, seed: int) -> str:
        """Begin an episode."""
        observation, _ = self._env.reset(seed=seed % _NUM_SEEDS)
        return self._text(observation)

    def act(self, action: str) -> str:
        """Take an action.

        Args:
            action: the action as a text, or its number.
        """
        space = self._env.action_space
        value = action
        if action.strip().isdecimal() and hasattr(space, "n"):  # actions are numbers
            value = int(action)
        if not space.contains(value):
            return f"'{action}' is not an action, actions are {space}"
        observation, reward, terminated, truncated, _ = self._env.step(value)
        self._reward += float(reward)
        self.done = bool(terminated or truncated)
        return self._text(observation)

    def _text(self, observation: Any) -> str:
        """Return the observation, or the rendered environment, without colors."""
        if self._env.render_mode == "ansi":
            observation = self._env.render()
        # Terminal colors mark a position: brackets take their place.
        text = str(observation).replace("\x1b[0m", "]")
        return re.sub("\x1b\\[[1-9]\\d*m", "[", text)

    def get_reward(self) -> float:
        """Return the sum of the rewards."""
        return self._reward

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


class TextArena:
    """Game of TextArena for one player (extra ``textarena``), with the tool ``act``.

    Args:
        id: id of the game, such as ``"Wordle-v0"``.
        **options: arguments of ``textarena.make``.

    Raises:
        UserError: the package is not installed.

    Example:
        >>> game = torchtune.rlhf.environments.TextArena("GuessTheNumber-v0")  # doctest: +SKIP
    """

    def __init__(self, id: str, **options: Any) -> None:
        textarena = require("textarena", extra="textarena", purpose="TextArena")
        self._env = textarena.make(f"{id.removesuffix('-raw')}-raw", **options)
        self.done = False

    def reset(self, seed: int) -> str:
        """Begin a game."""
        self._env.reset(num_players=1, seed=seed % _NUM_SEEDS)
        return self._text()

    def act(self, action: str) -> str:
        """Make a move.

        Args:
            action: the move, as the rules describe it.
        """
        done, _ = self._env.step(action)
        self.done = bool(done)
        return self._text()

    def _text(self) -> str:
        """Return the messages to the player since its last move."""
        _, observation = self._env.get_observation()  # of the player, (sender, message, type) each
        return "\n".join(message for _, message, _ in observation)

    def get_reward(self) -> float:
        """Return the reward of the game; 0 if the game has not ended."""
        rewards, _ = self._env.close()  # by player
        return float((rewards or {}).get(0, 0.0))
