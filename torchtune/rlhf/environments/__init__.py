"""Environments for reinforcement learning: tools, tool calls, and multi-turn conversations."""

from torchtune.rlhf._rollouts import ENDS, Episode
from torchtune.rlhf.environments._episodes import Environments, setup_environments
from torchtune.rlhf.environments._external_environments import Gymnasium, OpenEnv, OpenEnvGym, TextArena
from torchtune.rlhf.environments._sessions import Continuation, Sample, Sessions, episodes_of
from torchtune.rlhf.environments._tools import (
    FORMATS,
    CallError,
    ToolCall,
    check_call,
    detect_format,
    parameters_of,
    parse_calls,
    tools_of,
)
from torchtune.rlhf.environments._turn_tokens import Bridge

__all__ = [
    "ENDS",
    "FORMATS",
    "Bridge",
    "CallError",
    "Continuation",
    "Environments",
    "Episode",
    "Gymnasium",
    "OpenEnv",
    "OpenEnvGym",
    "Sample",
    "Sessions",
    "TextArena",
    "ToolCall",
    "check_call",
    "detect_format",
    "episodes_of",
    "parameters_of",
    "parse_calls",
    "setup_environments",
    "tools_of",
]
