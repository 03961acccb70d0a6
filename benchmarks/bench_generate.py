"""Greedy generation beside ``transformers.generate``: tokens per CPU-second in one run, and whether tokens are equal.

    python benchmarks/bench_generate.py --checkpoint_dir /tmp/SmolLM2-135M-Instruct

Rounds alternate between the two, each case with the same prompts and no stop token; ratios are of the best rounds.
Ragged prompts are padded on their left in both.
"""

import argparse
import time
from collections.abc import Callable

import torch

from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.generation import generate_tokens
from torchtune.models import from_hf_config
from torchtune.training import set_default_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load(folder: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Our model and that of ``transformers``."""
    from transformers import AutoModelForCausalLM

    with set_default_dtype(dtype), torch.device("meta"):
        ours = from_hf_config(folder)
    FullModelHFCheckpointer(folder).load_model(ours, device=torch.device("cpu"))
    return ours, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def theirs(model: torch.nn.Module, prompts: list[list[int]], new: int) -> list[list[int]]:
    """New tokens of ``transformers.generate``."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(padded, attention_mask=mask, **options)[:, longest:].tolist()


def ours(model: torch.nn.Module, prompts: list[list[int]], new: int) -> list[list[int]]:
    """New tokens of this library."""
    return [row.tolist() for row in generate_tokens(model, prompts, max_new_tokens=new, temperature=0.0).tokens]


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, float, list[list[int]]]:
    """CPU seconds, wall seconds and result."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = run()
    return time.process_time() - cpu, time.perf_counter() - wall, found


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint_dir", required=True)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    args = parser.parse_args()
    rng = torch.Generator().manual_seed(0)
    print(f"{torch.get_num_threads()} threads; new tokens per CPU-second, ours and theirs")
    for name in args.dtypes:
        models = load(args.checkpoint_dir, DTYPES[name])
        for kind, lengths in (("1", [32]), ("16", [32] * 16), ("16 ragged", [8 + 3 * i for i in range(16)])):
            prompts = [torch.randint(1000, 40_000, (length,), generator=rng).tolist() for length in lengths]
            pair = ours, theirs
            rounds = [
                [timed(lambda: run(model, prompts, args.new)) for run, model in zip(pair, models, strict=True)]  # noqa: B023
                for _ in range(args.rounds)
            ]
            cpu, wall = ([min(one[i][j] for one in rounds) for i in range(2)] for j in range(2))
            equal = sum(a == b for a, b in zip(rounds[0][0][2], rounds[0][1][2], strict=True))
            speed = [len(prompts) * args.new / seconds for seconds in cpu]
            print(
                f"{name} batch {kind:9}: {speed[0]:6.1f} and {speed[1]:6.1f}, {cpu[1] / cpu[0]:.2f} x "
                f"(wall {wall[1] / wall[0]:.2f} x), {equal} of {len(prompts)} rows equal",
                flush=True,
            )


if __name__ == "__main__":
    main()
