"""Episodes of a random model, which calls a tool by chance: what is sampled, replied, trained on and left out."""

import asyncio
import itertools
import math
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import torchtune
from tests.recipes.noting import STOP, Notes
from tests.tiny import write_checkpoint
from tests.tiny_images import gemma4_config, image_text_model, qwen3_vl_config, write_image_checkpoint
from tests.torchtune.rlhf.test_grpo import token_scores
from torchtune import rlhf
from torchtune.data import Message
from torchtune.datasets import prompt_dataset
from torchtune.rlhf import LocalSampler, Prompt, RewardSum, RolloutError, collate_rollouts, score_rollouts
from torchtune.rlhf.environments import ENDS, Environments, Episode
from torchtune.rlhf.loss import GRPOLoss
from torchtune.tokenizers import hf_tokenizer
from torchtune.training import ParallelDims

SEEDS = [11, 22, 33]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("model"))
    return *torchtune.load(folder, device="cpu"), str(folder)


@pytest.fixture
def make(tiny):
    model, tokenizer, _ = tiny

    def build(factory=Notes, max_sequences=None, **options):
        sampler = LocalSampler(model, tokenizer, max_new_tokens=9, stop_tokens=STOP, max_sequences=max_sequences)
        return Environments(factory, sampler, tokenizer, **{"max_turns": 3, "tool_format": "by_length", **options})

    return build


@pytest.fixture(scope="module")
def prompts(tiny):
    found = []
    for number, text in enumerate(("the cat", "a dog runs", "why")):
        messages = [Message(role="user", content=text)]
        tokens = tiny[1].tokenize_messages(messages, add_end_tokens=False)[0]
        found.append(Prompt(tokens, {"start": f"s{number}", "unused": 1}, number, messages=messages))
    return found


def same(one: Episode, other: Episode) -> bool:
    return (
        one.end == other.end and torch.equal(one.tokens, other.tokens) and torch.equal(one.log_probs, other.log_probs)
    )


def test_turns_are_bridged_masked_and_scored_by_the_trainer_alike(make, prompts, tiny):
    model, tokenizer, _ = tiny
    environments = make()
    episodes = environments(prompts, 16, SEEDS)
    assert len({(one.turns, one.calls, one.errors) for one in episodes}) > 4
    ends = Counter(one.end for one in episodes)
    assert set(ends) == {"completed", "max_turns", "max_tokens", "parse_error"}
    several = [one for one in episodes if one.turns > 1]
    for one in several:
        text = tokenizer.decode(one.answer, skip_special_tokens=False)
        replies = [part for part in text.split("<|im_start|>")[1:] if part.startswith(("tool", "user"))]
        ran = one.calls - (one.end == "max_turns")
        assert sum("notes<|im_end|>" in reply for reply in replies) == ran
        assert sum("Error: too long by one." in reply for reply in replies) == one.errors - (one.end == "parse_error")
        # All that was not sampled is the bridge, token by token.
        others = one.tokens[one.prompt_len :][~one.mask].tolist()
        rendered = tokenizer.decode(others, skip_special_tokens=False)
        assert rendered.count("<|im_start|>assistant") == one.turns - 1
    assert all("Begin with s0." in tokenizer.decode(one.tokens[: one.prompt_len].tolist()) for one in episodes[:16])
    batch = collate_rollouts(episodes, [0.5] * len(episodes))
    assert batch.num_labels == sum(int(one.mask.sum()) for one in episodes)
    assert batch.per_document["label_counts"].tolist() == [one.num_sampled for one in episodes]
    scores, labelled = token_scores(model, batch)
    sampled = torch.cat([one.log_probs[one.mask] for one in episodes])
    torch.testing.assert_close(scores[labelled], sampled, atol=1e-4, rtol=0)
    assert batch.labels[labelled].tolist() == [
        t for one in episodes for t in one.tokens[one.prompt_len :][one.mask].tolist()
    ]
    assert all(not one.log_probs[~one.mask].any() for one in episodes)
    assert [one.reward for one in episodes] == [1.0 + one.calls for one in episodes]


# After a user's turn, earlier turns have no reasoning, nor the mark of its absence that a prompt ends with.
STRIPS = """{%- set found = namespace(last=0) -%}
{%- for m in messages if m.role == "user" %}{% set found.last = messages.index(m) %}{% endfor -%}
{%- for m in messages %}{{ "<|im_start|>" + m.role + "\n" }}
{%- if m.reasoning_content and loop.index0 > found.last %}{{ "<think>" + m.reasoning_content + "</think>" }}{% endif -%}
{{ m.content + "<|im_end|>\n" }}{% endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n<think></think>" }}{% endif %}"""


@pytest.mark.parametrize("reasoning", ["strip", "keep"])
def test_turns_whose_prompt_the_template_changes_become_separate_samples(make, prompts, tiny, reasoning):
    model, _, folder = tiny
    other = hf_tokenizer(folder, chat_template=STRIPS, reasoning=reasoning)
    sampler = LocalSampler(model, other, max_new_tokens=9, stop_tokens=STOP)
    environments = Environments(Notes, sampler, other, max_turns=4, tool_format="by_length")
    episodes = environments(prompts, 16, SEEDS)
    corrected = [one for one in episodes if one.errors > (one.end == "parse_error")]
    assert corrected
    assert all(bool(one.earlier) == (reasoning == "strip") for one in corrected)
    assert not any(one.earlier for one in episodes if not one.errors)
    scored = score_rollouts(prompts, episodes, RewardSum([]), other)
    advantages = rlhf.GroupAdvantages()(scored.rewards)
    batches, _, labels = scored.batches(advantages, GRPOLoss(), ParallelDims(), 10_000)
    assert labels == sum(part.num_sampled for one in episodes for part in one.parts)
    assert scored.figures()["answers/tokens"] == (labels, len(episodes))
    for batch in batches:
        scores, labelled = token_scores(model, batch)
        torch.testing.assert_close(scores[labelled], batch.per_token["sampled"][labelled], atol=1e-5, rtol=0)
    for one in corrected:
        text = other.decode(one.tokens.tolist(), skip_special_tokens=False)
        # A prompt ends with the mark, and so does one after replies of tools.
        assert text.count("<think></think>") == (one.turns if reasoning == "keep" else text.count("<think></think>"))
        for part in one.earlier:
            assert other.decode(part.tokens[: part.prompt_len].tolist()).endswith("<think></think>")


def test_episodes_do_not_depend_on_the_time_of_tools(make, prompts):
    quick, slow = (make(lambda pause=pause: Notes(pause), max_sequences=16) for pause in (0.0, 0.01))
    first, again, delayed = quick(prompts, 16, SEEDS), quick(prompts, 16, SEEDS), slow(prompts, 16, SEEDS)
    assert all(map(same, first, again))
    assert all(map(same, first, delayed))
    assert slow.seconds["tools"] > 0.1
    alone = quick(prompts[1:2], 16, SEEDS[1:2])
    assert [one.answer for one in alone] == [one.answer for one in first[16:32]]
    assert not any(map(same, first[:16], quick(prompts[:1], 16, [12])))


def test_tools_run_while_other_episodes_decode(make, prompts):
    """Forty-eight episodes of tools with a pause: in turn they would need its sum."""
    environments = make(lambda: Notes(0.1), max_sequences=16)
    episodes = environments(prompts, 16, SEEDS)
    spent = environments.seconds["tools"]
    assert spent > 3.0
    assert environments.seconds["idle"] < 0.5 * spent
    assert sum(one.calls for one in episodes) > 20


def test_an_episode_without_tools_equals_an_answer_bit_for_bit(make, prompts):
    class Silent:
        def reset(self) -> None: ...

    environments = make(Silent, tool_format=None)
    answers = environments._sampler([prompt.tokens for prompt in prompts], 4, SEEDS)
    for episode, answer in zip(environments(prompts, 4, SEEDS), answers, strict=True):
        assert torch.equal(episode.tokens, answer.tokens)
        assert torch.equal(episode.log_probs, answer.log_probs)
        assert episode.finished == answer.finished
        assert episode.reward is None
    greedy = [one.answer for one in environments(prompts, 1)]
    assert greedy == [one.answer for one in environments._sampler([prompt.tokens for prompt in prompts], 1)]


class Faulty(Notes):
    """Fails in one of many ways, if the episode gets there; one in sixteen works."""

    FAULTS = ("build", "raise", "exit", "object", "no Unicode", "hang", "reset", "observation", "reward", "nan", "huge")
    numbers, injected = itertools.count(), []
    is_over = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        number = next(Faulty.numbers)
        self.fault = Faulty.FAULTS[number % len(Faulty.FAULTS)] if number % 16 else None
        self.cannot_close = number % 5 == 1
        if self._has("build"):
            raise MemoryError("no room")

    def _has(self, fault: str) -> bool:
        if self.fault == fault:
            Faulty.injected.append(fault)
        return self.fault == fault

    def reset(self, start: str, seed: int) -> Any:
        if self._has("reset"):
            raise RuntimeError("no start")
        return 7 if self._has("observation") else super().reset(start, seed)

    def note(self, text: str) -> Any:
        """Note a text."""
        if self._has("raise"):
            raise ValueError("broken")
        if self._has("exit"):
            raise SystemExit(3)
        if self._has("hang"):
            Faulty.is_over.wait(60.0)
        if self._has("no Unicode"):
            return "\ud800"
        return object() if self._has("object") else super().note(text)

    def get_reward(self) -> Any:
        if self._has("reward"):
            raise KeyError("score")
        return math.nan if self._has("nan") else 10**400 if self._has("huge") else super().get_reward()

    def close(self) -> None:
        if self.cannot_close:
            Faulty.injected.append("close")
            raise OSError("it is busy")


def test_failed_episodes_lose_no_step_and_are_not_trained_on(make, prompts, tiny):
    environments, size = make(Faulty, timeout=3.0, max_turns=2), 480
    Faulty.injected.clear()
    episodes = environments(prompts, size, SEEDS)
    Faulty.is_over.set()
    injected = Counter(Faulty.injected)
    unclosed = injected.pop("close")
    failed = [one for one in episodes if not one.is_valid]
    assert len(episodes) == 3 * size
    assert len(failed) == injected.total() > 1000
    assert set(injected) == set(Faulty.FAULTS)
    assert min(injected.values()) > 40
    assert Counter(one.end for one in failed)["timeout"] == injected["hang"]
    assert all(one.failure and math.isnan(one.reward) for one in failed)
    scored = score_rollouts(prompts, episodes, RewardSum([]), tiny[1])
    valid = torch.tensor([one.is_valid for one in episodes], device="cpu").view(3, size)
    assert torch.equal(~scored.rewards.isnan(), valid)
    advantages = rlhf.GroupAdvantages()(scored.rewards)
    assert advantages[valid].view(-1).sum().abs() < 1e-9, "the mean is that of valid episodes"
    batches, terms, labels = scored.batches(advantages, GRPOLoss(), ParallelDims(), 4096)
    assert terms == labels == sum(one.num_sampled for one in episodes if one.is_valid)
    trained = torch.cat([batch.labels[batch.labels >= 0] for batch in batches])
    expected = torch.cat([one.tokens[one.prompt_len :][one.mask] for one in episodes if one.is_valid])
    assert torch.equal(trained, expected)
    figures = scored.figures()
    assert figures["ends/timeout"][0] + figures["ends/environment_failed"][0] == len(failed)
    assert sum(figures[f"ends/{end}"][0] for end in ENDS) == 3 * size
    blank = Prompt(prompts[0].tokens, {}, 0, is_blank=True)
    environments([blank], 1, [1])
    assert environments.figures()["tools/unclosed"] == (unclosed, 1)


class Unclosable(Notes):
    async def close(self) -> None:
        await asyncio.sleep(0)
        raise OSError("it is busy")


def test_an_episode_ends_when_the_environment_or_the_context_does(make, prompts, tiny):
    class Once(Notes):
        done = False

        async def note(self, text: str) -> dict:
            """Note a text."""
            await asyncio.sleep(0)
            self.done = True
            return {"text": text}

    for one in make(Once)(prompts, 8, SEEDS):
        assert one.calls <= 1
        assert one.end == "completed" or one.calls == 0

    longest = tiny[0].max_seq_len

    class Long(Notes):
        def note(self, text: str) -> str:
            """Note a text."""
            return "word " * (longest // 4)

    environments = make(Long, max_turns=50)
    episodes = environments(prompts, 3, SEEDS)
    assert any(one.end == "context" for one in episodes)
    assert all(len(one.tokens) <= longest + 1 for one in episodes)
    long = [Message(role="user", content="word " * longest)]
    (none,) = environments([Prompt([1] * 9, {"start": ""}, 0, messages=long)], 1, [1])
    assert (none.end, none.num_sampled) == ("context", 0)


def test_a_column_selects_the_environment_and_invalid_environments_are_refused(make, prompts, tiny, caplog):
    class Other(Notes):
        def look(self, at: str) -> str:
            """Look at something."""
            return at

    both = make({"notes": Notes, "other": Other})
    assert "The chat template omits the definitions of tools" in caplog.text
    rows = [
        Prompt(one.tokens, {**one.row, "environment": name}, one.number, messages=one.messages)
        for one, name in zip(prompts, ("notes", "other", "notes"), strict=True)
    ]
    assert [one.environment for one in both(rows, 1, SEEDS)] == ["Notes", "Other", "Notes"]
    assert "The tools in the rows are not used" not in caplog.text
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with_tools = [Prompt(one.tokens, {**one.row, "tools": tools}, one.number, messages=one.messages) for one in rows]
    both(with_tools, 1, SEEDS)
    assert caplog.text.count("The tools in the rows are not used") == 1
    with pytest.raises(RolloutError, match=r"row 0 names the environment None: .*one of notes, other"):
        both(prompts, 1, SEEDS)
    with pytest.raises(RolloutError, match="row 0 has no messages"):
        make()([Prompt([1, 2], {"start": ""}, 0)], 1, [1])
    with pytest.raises(RolloutError, match="object has no method 'reset'"):
        make(object)
    with pytest.raises(RolloutError, match="cannot be built"):
        make(lambda: 1 // 0)
    with pytest.raises(RolloutError, match="tool_format is None, and the chat template shows no known one"):
        make(tool_format=None)
    with pytest.raises(RolloutError, match=r"take the sampler torchtune.rlhf.LocalSampler"):
        Environments(Notes, object(), tiny[1])
    with pytest.raises(RolloutError, match=r"Unclosable cannot be closed \(OSError: it is busy\)"):
        make(Unclosable)
    blank = Prompt(prompts[0].tokens, {}, 0, is_blank=True)
    (one,) = make()([blank], 1, [1])
    assert (one.num_sampled, one.reward) == (0, None)


class Sights(Notes):
    """Shows a picture, which is missing for one row."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def reset(self, seed: int, start: str) -> list[dict[str, Any]]:
        super().reset(seed, start)
        return [{"type": "text", "text": "And this?"}, {"type": "image", "image": str(self.folder / f"{start}.png")}]


@pytest.mark.parametrize("family", [qwen3_vl_config, gemma4_config])
def test_all_turns_see_the_images_of_rows_and_environments(family, tmp_path):
    folder = write_image_checkpoint(image_text_model(family()), tmp_path / "checkpoint")
    model, tokenizer = torchtune.load(folder, device="cpu", images=True)
    data = []
    for name, color in (("s0", "red"), ("s1", "lime"), ("lost", "blue")):
        picture = Image.new("RGB", (30, 20 + len(data)), color)
        picture.save(tmp_path / f"{name}.png")
        data.append({"prompt": "<image>?", "image": picture, "start": name})
    (tmp_path / "lost.png").unlink()
    found = rlhf.collate_prompts(list(prompt_dataset(tokenizer, source=data)))
    sampler = LocalSampler(model, tokenizer, max_new_tokens=9, stop_tokens=STOP, max_sequences=6)
    environments = Environments(partial(Sights, tmp_path), sampler, tokenizer, max_turns=3, tool_format="by_length")
    episodes = environments(found.prompts, 8, SEEDS)
    lost = episodes[16:]
    assert {one.end for one in lost} == {"environment_failed"}
    assert "image 2 of 2: the image" in lost[0].failure
    assert "lost.png cannot be read (there is no such file)" in lost[-1].failure
    episodes = episodes[:16]
    assert max(one.turns for one in episodes) == 3
    for one in episodes:
        assert len(one.images["encoder_input"]["images"].grids) == 2
    batch = collate_rollouts(episodes, [0.5] * len(episodes))
    assert len(batch.inputs["encoder_input"]["images"].grids) == 2 * 2  # the answers to a row share them
    sampled = torch.cat([one.log_probs[one.mask] for one in episodes])
    with torch.no_grad():
        scores, labelled = token_scores(model, batch)
        images = batch.inputs["encoder_input"]["images"]
        batch.inputs["encoder_input"] = {"images": replace(images, pixels=images.pixels.flip(0))}
        others, _ = token_scores(model, batch)
    torch.testing.assert_close(scores[labelled], sampled, atol=1e-4, rtol=0)
    assert (others[labelled] - sampled).abs().max() > 1e-3
