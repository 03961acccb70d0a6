"""Score a model on the held-out orders: an answer counts if it is, letter for letter, the right JSON.

python examples/quickstart/score.py quickstart/SmolLM2-135M-Instruct
"""

import argparse
import json
from pathlib import Path

import torch

from torchtune import training
from torchtune.data import Message
from torchtune.generation import generate
from torchtune.models import from_hf_config
from torchtune.modules import TransformerDecoder, local_kv_cache
from torchtune.modules.transforms.tokenizers import HuggingFaceModelTokenizer, hf_tokenizer
from torchtune.training import FullModelHFCheckpointer

HELD_OUT = Path(__file__).parent / "data" / "held_out.jsonl"
MAX_NEW_TOKENS = 40  # the longest right answer has 30


def load(folder: str | Path, dtype: torch.dtype) -> tuple[TransformerDecoder, HuggingFaceModelTokenizer]:
    """Model and tokenizer of a Hugging Face folder, for inference on the CPU."""
    with training.set_default_dtype(dtype), torch.device("meta"):
        model = from_hf_config(str(folder))
    FullModelHFCheckpointer(checkpoint_dir=str(folder)).load_model(model, device=torch.device("cpu"))
    return model.eval(), hf_tokenizer(str(folder))


def conversations() -> list[dict[str, str]]:
    """System prompt, sentence and right answer (keys system, user, assistant) of every held-out order."""
    rows = map(json.loads, HELD_OUT.read_text().splitlines())
    return [{message["role"]: message["content"] for message in row["messages"]} for row in rows]


@torch.inference_mode()
def answer(
    model: TransformerDecoder, tokenizer: HuggingFaceModelTokenizer, asked: list[dict[str, str]], batch_size: int = 30
) -> list[str]:
    """The likeliest answer to each conversation, in batches."""
    prompts = []
    for each in asked:
        messages = [Message(role=role, content=each[role]) for role in ("system", "user")]
        messages.append(Message(role="assistant", content=""))
        prompts.append(tokenizer({"messages": messages}, inference=True)["tokens"])
    answers = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        longest = max(map(len, batch))
        padded = torch.tensor([[tokenizer.pad_id] * (longest - len(prompt)) + prompt for prompt in batch])
        dtype = next(model.parameters()).dtype
        size = longest + MAX_NEW_TOKENS
        with local_kv_cache(model, batch_size=len(batch), device=padded.device, dtype=dtype, decoder_max_seq_len=size):
            tokens, _ = generate(
                model,
                padded,
                max_generated_tokens=MAX_NEW_TOKENS,
                pad_id=tokenizer.pad_id,
                temperature=0,
                stop_tokens=tokenizer.stop_tokens,
                prompt_lengths=[len(prompt) for prompt in batch],
            )
        answers += [tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens[:, longest:].tolist()]
    return answers


def main() -> None:
    """Print the share of right answers of a model folder, and some of its answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model in Hugging Face's layout")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    asked = conversations()
    answers = answer(*load(args.folder, training.get_dtype(args.dtype)), asked)
    right = sum(given == each["assistant"] for given, each in zip(answers, asked, strict=True))
    for each, given in list(zip(asked, answers, strict=True))[:3]:
        print(f"{each['user']}\n  answer {given}\n  right  {each['assistant']}")
    print(f"{right} of {len(asked)} right ({right / len(asked):.0%})")


if __name__ == "__main__":
    main()
