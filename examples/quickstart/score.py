"""Score a model on the held-out orders: an answer counts if it is, letter for letter, the right JSON.

python examples/quickstart/score.py quickstart/SmolLM2-135M-Instruct
"""

import argparse
import json
from pathlib import Path

import torch

from torchtune import training
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.data import Message
from torchtune.generation import generate_tokens
from torchtune.models import from_hf_config
from torchtune.modules import TransformerDecoder
from torchtune.tokenizers import HuggingFaceModelTokenizer, hf_tokenizer

HELD_OUT = Path(__file__).parent / "data" / "held_out.jsonl"
MAX_NEW_TOKENS = 40  # the longest right answer has 30


def load(
    folder: str | Path, dtype: str | None = None, chat_template: str | None = None
) -> tuple[TransformerDecoder, HuggingFaceModelTokenizer]:
    """Model and tokenizer of a Hugging Face folder, for inference on the CPU; by default in its fastest dtype."""
    device = torch.device("cpu")
    with training.set_default_dtype(training.choose_dtype(dtype, device)[1]), torch.device("meta"):
        model = from_hf_config(str(folder))
    FullModelHFCheckpointer(checkpoint_dir=str(folder)).load_model(model, device=device)
    return model.eval(), hf_tokenizer(str(folder), chat_template=chat_template)


def conversations() -> list[dict[str, str]]:
    """System prompt, sentence and right answer (keys system, user, assistant) of every held-out order."""
    rows = map(json.loads, HELD_OUT.read_text().splitlines())
    return [{message["role"]: message["content"] for message in row["messages"]} for row in rows]


def answer(
    model: TransformerDecoder,
    tokenizer: HuggingFaceModelTokenizer,
    asked: list[dict[str, str]],
    max_sequences: int | None = 64,
) -> list[str]:
    """The likeliest answer to each conversation; ``max_sequences`` are generated at once."""
    prompts = []
    for each in asked:
        messages = [Message(role=role, content=each[role]) for role in ("system", "user")]
        messages.append(Message(role="assistant", content=""))
        prompts.append(tokenizer({"messages": messages}, inference=True)["tokens"])
    generated = generate_tokens(
        model,
        prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=0.0,
        stop_tokens=tokenizer.stop_tokens,
        max_sequences=max_sequences,
    )
    return [tokenizer.decode(row.tolist(), skip_special_tokens=True).strip() for row in generated.tokens]


def main() -> None:
    """Print the share of right answers of a model folder, and some of its answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model in Hugging Face's layout")
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    args = parser.parse_args()
    asked = conversations()
    answers = answer(*load(args.folder, args.dtype), asked)
    right = sum(given == each["assistant"] for given, each in zip(answers, asked, strict=True))
    for each, given in list(zip(asked, answers, strict=True))[:3]:
        print(f"{each['user']}\n  answer {given}\n  right  {each['assistant']}")
    print(f"{right} of {len(asked)} right ({right / len(asked):.0%})")


if __name__ == "__main__":
    main()
