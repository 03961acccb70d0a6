"""Time that a step of reinforcement learning loses to tools: seconds of decoding and waiting, without and with a delay.

    python benchmarks/bench_tools.py --checkpoint_dir /tmp/SmolLM2-135M-Instruct --delays 0 0.5

Every turn of the model counts as a call of a tool that sleeps; the tools' own time, one after another, is printed
beside the time that was waited. ``lost`` is the waiting as a share of decoding (CPU seconds per thread, so that other
programs do not make it look smaller) and waiting, without training, which would make it smaller still.
"""

import argparse
import time
from functools import partial

import torch

from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.data import Message
from torchtune.models import from_hf_config
from torchtune.rlhf import LocalSampler, Prompt
from torchtune.rlhf.environments import FORMATS, Environments, ToolCall
from torchtune.tokenizers import hf_tokenizer
from torchtune.training import set_default_dtype


class Sleeping:
    """An environment with a slow tool."""

    def __init__(self, delay: float) -> None:
        self._delay = delay

    def reset(self) -> None:
        """Begin an episode."""

    def look(self) -> str:
        """Look around."""
        time.sleep(self._delay)
        return "There is nothing."


FORMATS["always"] = lambda text, schemas: [ToolCall("look")]


def main() -> None:
    """Print a line for each delay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--num_samples", type=int, default=8)
    parser.add_argument("--max_sequences", type=int)
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--max_turns", type=int, default=3)
    args = parser.parse_args()
    with set_default_dtype(torch.bfloat16), torch.device("meta"):
        model = from_hf_config(args.checkpoint_dir)
    FullModelHFCheckpointer(args.checkpoint_dir).load_model(model, device=torch.device("cpu"))
    tokenizer = hf_tokenizer(args.checkpoint_dir)
    prompts = []
    for number in range(args.prompts):
        messages = [Message(role="user", content=f"Name something with {number + 2} legs in a sentence.")]
        tokens = tokenizer.tokenize_messages(messages, add_end_tokens=False)[0]
        prompts.append(Prompt(tokens, {}, number, messages=messages))
    sampler = LocalSampler(model, tokenizer, max_new_tokens=args.max_new_tokens, max_sequences=args.max_sequences)
    print(f"{'delay':>6} {'calls':>6} {'tools':>7} {'decode':>7} {'CPU':>7} {'waited':>7} {'lost':>6}")
    for delay in args.delays:
        factory = partial(Sleeping, delay)
        environments = Environments(factory, sampler, tokenizer, max_turns=args.max_turns, tool_format="always")
        begun = time.process_time()
        episodes = environments(prompts, args.num_samples, list(range(args.prompts)))
        cpu = (time.process_time() - begun) / torch.get_num_threads()
        seconds, calls = environments.seconds, sum(one.calls for one in episodes)
        lost = seconds["idle"] / (cpu + seconds["idle"])
        print(
            f"{delay:6.2f} {calls:6d} {seconds['tools']:7.1f} {seconds['generate']:7.1f} {cpu:7.1f} "
            f"{seconds['idle']:7.2f} {lost:6.1%}"
        )


if __name__ == "__main__":
    main()
