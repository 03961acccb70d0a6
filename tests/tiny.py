"""Small things that tests train: a random Llama in a standard Hugging Face folder, and a conversation file."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A dataset of conversations in OpenAI's layout: add source.
OPENAI = {"conversation_column": "messages", "conversation_style": "openai"}
CHATS = {"_component_": "torchtune.datasets.chat_dataset", **OPENAI}
WORDS = "red green blue one two three cat dog bird sees likes finds the a and not why where big small".split()


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[Any]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_tokenizer(folder: Path) -> int:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of a byte-level BPE; return its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}))
    return tokenizer.get_vocab_size()


def write_checkpoint(
    folder: Path,
    *,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    width: int = 32,
    vocab_size: int | None = None,
    is_reward: bool = False,
    key_heads: int = 2,
) -> Path:
    """Write a random two-layer Llama with its tokenizer into ``folder``, as ``transformers`` does.

    A reward model has one output in the place of the vocabulary.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    folder.mkdir(parents=True, exist_ok=True)
    needed = write_tokenizer(folder)
    torch.manual_seed(seed)
    model = (LlamaForSequenceClassification if is_reward else LlamaForCausalLM)(
        LlamaConfig(
            vocab_size=vocab_size or needed,
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=key_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=tied and not is_reward,
            **({"num_labels": 1, "pad_token_id": 0} if is_reward else {}),
            initializer_range=0.2,
        )
    )
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)  # save_pretrained overwrites generation_config.json
    return folder


def write_adapter(folder: Path, base: Path, *, rank: int = 2, init: bool | str = True) -> Path:
    """Write a random adapter of the checkpoint ``base`` into ``folder``, as ``peft`` does."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    torch.manual_seed(rank)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


def _sentence(rng: random.Random, longest: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, longest)))


def write_conversations(path: Path, count: int = 24, *, seed: int = 0) -> Path:
    """Write ``count`` conversations of one or two turns, of very different lengths, as JSON lines."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        messages = []
        for _ in range(rng.randint(1, 2)):
            messages.append({"role": "user", "content": _sentence(rng, 12)})
            messages.append({"role": "assistant", "content": _sentence(rng, 6)})
        rows.append({"messages": messages})
    return write_lines(path, rows)


def write_pairs(path: Path, count: int = 12, *, seed: int = 0) -> Path:
    """Write ``count`` pairs of answers to a question, of very different lengths, as JSON lines."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        question = {"role": "user", "content": _sentence(rng, 12)}
        answers = [_sentence(rng, 8), f"{_sentence(rng, 8)} {WORDS[number % len(WORDS)]}"]
        pair = [[question, {"role": "assistant", "content": answer}] for answer in answers]
        rows.append(dict(zip(("chosen", "rejected"), pair, strict=True)))
    return write_lines(path, rows)
