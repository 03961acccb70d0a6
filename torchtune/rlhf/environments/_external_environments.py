"""Environments from other libraries; each requires a package or a server."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torchtune.rlhf._http import post_json
from torchtune.rlhf._rollouts import RolloutError
from torchtune.utils import require


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
        self._url, self._timeout, self._session = f"{url.rstrip('/')}/mcp", timeout, {}
        self._tools = self._request("tools/list")["tools"]

    def _request(self, method: str, **params: Any) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, **self._session}}
        reply = post_json(self._url, body, timeout=self._timeout)
        if not isinstance(reply, Mapping) or reply.get("result") is None:
            raise RolloutError(f"{self._url} replies to {method} with {str(reply)[:300]}, which is no result.")
        return reply["result"]

    def reset(self) -> None:
        """Begin a session."""
        self._session = {"session_id": self._request("openenv/session/create")["session_id"]}

    def tools(self) -> list[dict[str, Any]]:
        """Return the definitions of the server's tools."""
        schema = ("inputSchema", "input_schema")
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": next((tool[name] for name in schema if tool.get(name)), {}),
                },
            }
            for tool in self._tools
        ]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or all(tool["name"] != name for tool in self._tools):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, tool: str, **arguments: Any) -> Any:
        found = self._request("tools/call", name=tool, arguments=arguments)
        return found["data"] if isinstance(found, Mapping) and "data" in found else found

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
        self._url, self._timeout = url.rstrip("/"), timeout
        self._socket, self._reward, self.done = None, 0.0, False
        self._action = post_json(f"{self._url}/schema", None, timeout=timeout)["action"]

    def tools(self) -> list[dict[str, Any]]:
        """Return the definition of ``act``."""
        properties = {name: one for name, one in self._action["properties"].items() if name != "metadata"}
        parameters = {**self._action, "properties": properties}
        function = {"name": "act", "description": "Take an action.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def reset(self, seed: int, **row: Any) -> str:
        """Begin a session and an episode."""
        self._socket = self._client.connect(f"ws{self._url.removeprefix('http')}/ws", open_timeout=self._timeout)
        return self._send("reset", {"seed": seed % 2**31, **row})

    def act(self, **action: Any) -> str:
        """Take an action."""
        return self._send("step", action)

    def _send(self, kind: str, data: Mapping[str, Any]) -> str:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._socket.recv(timeout=self._timeout))
        if reply["type"] == "error":
            if kind == "step" and reply["data"].get("code") == "VALIDATION_ERROR":  # the model's mistake
                return json.dumps([one["msg"] for one in reply["data"]["errors"]])
            raise RolloutError(f"{self._url} replies to {kind} with {str(reply['data'])[:300]}.")
        self._reward += float(reply["data"]["reward"] or 0.0)
        self.done = reply["data"]["done"]
        observation = {name: one for name, one in reply["data"]["observation"].items() if name != "metadata"}
        return json.dumps(observation, ensure_ascii=False)

    def get_reward(self) -> float:
        """Return the sum of the rewards."""
        return self._reward

    def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            self._socket.close()


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
        self._env, self._reward, self.done = gymnasium.make(id, **{"render_mode": "ansi", **options}), 0.0, False

    def reset(self, seed: int) -> str:
        """Begin an episode."""
        return self._text(self._env.reset(seed=seed % 2**31)[0])

    def act(self, action: str) -> str:
        """Take an action.

        Args:
            action: the action as a text, or its number.
        """
        space = self._env.action_space
        value = int(action) if action.strip().isdecimal() and hasattr(space, "n") else action
        if not space.contains(value):
            return f"'{action}' is no action, actions are {space}"
        observation, reward, terminated, truncated, _ = self._env.step(value)
        self._reward += float(reward)
        self.done = bool(terminated or truncated)
        return self._text(observation)

    def _text(self, observation: Any) -> str:
        text = str(self._env.render() if self._env.render_mode == "ansi" else observation)
        return re.sub("\x1b\\[[1-9]\\d*m", "[", text.replace("\x1b[0m", "]"))  # terminal colors mark a position

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
        self._env, self.done = textarena.make(f"{id.removesuffix('-raw')}-raw", **options), False

    def reset(self, seed: int) -> str:
        """Begin a game."""
        self._env.reset(num_players=1, seed=seed % 2**31)
        return self._text()

    def act(self, action: str) -> str:
        """Make a move.

        Args:
            action: the move, as the rules describe it.
        """
        self.done = bool(self._env.step(action)[0])
        return self._text()

    def _text(self) -> str:
        return "\n".join(message for _, message, _ in self._env.get_observation()[1])

    def get_reward(self) -> float:
        """Return the reward of the game; 0 if the game has not ended."""
        return float((self._env.close()[0] or {}).get(0, 0.0))
