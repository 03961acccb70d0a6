"""Former names of prompts."""

from typing import TypedDict

from torchtune._lazy import former_names

_TASK = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think></think> and <answer></answer> tags, respectively, i.e., "
    "<think>reasoning process here</think> <answer>answer here</answer>. "
)
BASE_PROMPT = _TASK + "User: %s. Assistant: <think>"


class ReasoningProblem(TypedDict):
    """A question, the chain of thought, and the answer."""

    question: str
    cot: str
    answer: str


__getattr__ = former_names(__name__)
