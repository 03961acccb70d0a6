"""Episodes of a random model, which calls a tool by chance: what is sampled, replied, trained on and left out."""

import asyncio
import itertools
import math
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

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
    prompts = []
    for number, text in enumerate(("the cat", "a dog runs", "why")):
        messages = [Message(role="user", content=text)]
        tokens = tiny[1].tokenize_messages(messages, add_end_tokens=False)[0]
        prompts.append(Prompt(tokens, {"start": f"s{number}", "unused": 1}, number, messages=messages))
    return prompts


def are_equal(episode: Episode, expected: Episode) -> bool:
    return (
        episode.end == expected.end
        and torch.equal(episode.tokens, expected.tokens)
        and torch.equal(episode.log_probs, expected.log_probs)
    )


def test_turns_are_bridged_masked_and_scored_by_the_trainer_alike(make, prompts, tiny):
    model, tokenizer, _ = tiny
    environments = make()
    episodes = environments(prompts, 16, SEEDS)
    assert len({(episode.turns, episode.calls, episode.errors) for episode in episodes}) > 4
    ends = Counter(episode.end for episode in episodes)
    assert set(ends) == {"completed", "max_turns", "max_tokens", "parse_error"}
    for episode in episodes:
        if episode.turns == 1:
            continue
        text = tokenizer.decode(episode.answer, skip_special_tokens=False)
        replies = [turn for turn in text.split("<|im_start|>")[1:] if turn.startswith(("tool", "user"))]
        num_replied = episode.calls - (episode.end == "max_turns")
        assert sum("notes<|im_end|>" in reply for reply in replies) == num_replied
        num_corrected = episode.errors - (episode.end == "parse_error")
        assert sum("Error: too long by one." in reply for reply in replies) == num_corrected
        # All that was not sampled is the bridge, token by token.
        bridge_tokens = episode.tokens[episode.prompt_len :][~episode.mask].tolist()
        rendered = tokenizer.decode(bridge_tokens, skip_special_tokens=False)
        assert rendered.count("<|im_start|>assistant") == episode.turns - 1
    for episode in episodes[:16]:
        assert "Begin with s0." in tokenizer.decode(episode.tokens[: episode.prompt_len].tolist())
    batch = collate_rollouts(episodes, [0.5] * len(episodes))
    assert batch.num_labels == sum(int(episode.mask.sum()) for episode in episodes)
    assert batch.per_document["label_counts"].tolist() == [episode.num_sampled for episode in episodes]
    scores, labelled = token_scores(model, batch)
    sampled = torch.cat([episode.log_probs[episode.mask] for episode in episodes])
    torch.testing.assert_close(scores[labelled], sampled, atol=1e-4, rtol=0)
    sampled_tokens = torch.cat([episode.tokens[episode.prompt_len :][episode.mask] for episode in episodes])
    assert torch.equal(batch.labels[labelled], sampled_tokens)
    assert all(not episode.log_probs[~episode.mask].any() for episode in episodes)
    assert [episode.reward for episode in episodes] == [1.0 + episode.calls for episode in episodes]


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
    tokenizer = hf_tokenizer(folder, chat_template=STRIPS, reasoning=reasoning)
    sampler = LocalSampler(model, tokenizer, max_new_tokens=9, stop_tokens=STOP)
    environments = Environments(Notes, sampler, tokenizer, max_turns=4, tool_format="by_length")
    episodes = environments(prompts, 16, SEEDS)
    corrected = [episode for episode in episodes if episode.errors > (episode.end == "parse_error")]
    assert corrected
    assert all(bool(episode.earlier) == (reasoning == "strip") for episode in corrected)
    assert not any(episode.earlier for episode in episodes if not episode.errors)
    scored = score_rollouts(prompts, episodes, RewardSum([]), tokenizer)
    advantages = rlhf.GroupAdvantages()(scored.rewards)
    batches, _, labels = scored.batches(advantages, GRPOLoss(), ParallelDims(), 10_000)
    samples = list(itertools.chain.from_iterable(episode.parts for episode in episodes))
    assert labels == sum(sample.num_sampled for sample in samples)
    assert scored.figures()["answers/tokens"] == (labels, len(episodes))
    for batch in batches:
        scores, labelled = token_scores(model, batch)
        torch.testing.assert_close(scores[labelled], batch.per_token["sampled"][labelled], atol=1e-5, rtol=0)
    for episode in corrected:
        text = tokenizer.decode(episode.tokens.tolist(), skip_special_tokens=False)
        if reasoning == "keep":  # a prompt ends with the mark, also after replies of tools
            assert text.count("<think></think>") == episode.turns
        for sample in episode.earlier:
            assert tokenizer.decode(sample.tokens[: sample.prompt_len].tolist()).endswith("<think></think>")


def test_episodes_do_not_depend_on_the_time_of_tools(make, prompts):
    quick = make(lambda: Notes(0.0), max_sequences=16)
    slow = make(lambda: Notes(0.01), max_sequences=16)
    first = quick(prompts, 16, SEEDS)
    repeated = quick(prompts, 16, SEEDS)
    delayed = slow(prompts, 16, SEEDS)
    assert all(map(are_equal, first, repeated))
    assert all(map(are_equal, first, delayed))
    assert slow.seconds["tools"] > 0.1
    alone = quick(prompts[1:2], 16, SEEDS[1:2])
    assert [episode.answer for episode in alone] == [episode.answer for episode in first[16:32]]
    assert not any(map(are_equal, first[:16], quick(prompts[:1], 16, [12])))


def test_tools_run_while_other_episodes_decode(make, prompts):
    """Forty-eight episodes of tools with a pause: in turn they would need its sum."""
    environments = make(lambda: Notes(0.1), max_sequences=16)
    episodes = environments(prompts, 16, SEEDS)
    spent = environments.seconds["tools"]
    assert spent > 3.0
    assert environments.seconds["idle"] < 0.5 * spent
    assert sum(episode.calls for episode in episodes) > 20


def test_an_episode_without_tools_equals_an_answer_bit_for_bit(make, prompts):
    class Silent:
        def reset(self) -> None: ...

    environments = make(Silent, tool_format=None)
    token_ids = [prompt.tokens for prompt in prompts]
    answers = environments._sampler(token_ids, 4, SEEDS)
    for episode, answer in zip(environments(prompts, 4, SEEDS), answers, strict=True):
        assert torch.equal(episode.tokens, answer.tokens)
        assert torch.equal(episode.log_probs, answer.log_probs)
        assert episode.finished == answer.finished
        assert episode.reward is None
    greedy = [episode.answer for episode in environments(prompts, 1)]
    assert greedy == [rollout.answer for rollout in environments._sampler(token_ids, 1)]


class Faulty(Notes):
    """Fails in one of many ways, if the episode gets there; one in sixteen works."""

    FAULTS = ("build", "raise", "exit", "object", "no Unicode", "hang", "reset", "observation", "reward", "nan", "huge")
    numbers = itertools.count()
    injected: ClassVar[list[str]] = []
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
        if self._has("observation"):
            return 7
        return super().reset(start, seed)

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
        if self._has("object"):
            return object()
        return super().note(text)

    def get_reward(self) -> Any:
        if self._has("reward"):
            raise KeyError("score")
        if self._has("nan"):
            return math.nan
        if self._has("huge"):
            return 10**400
        return super().get_reward()

    def close(self) -> None:
        if self.cannot_close:
            Faulty.injected.append("close")
            raise OSError("it is busy")


class HalfACharacter(Notes):
    def reset(self, start: str, seed: int) -> list[dict[str, Any]]:
        return [{"type": "text", "text": "\ud800"}]


def test_observation_with_half_a_character_ends_its_own_episode_only(make, prompts):
    named_prompts = []
    for prompt, name in zip(prompts, ("notes", "broken", "notes"), strict=True):
        named_prompts.append(replace(prompt, row={**prompt.row, "environment": name}))
    environments = make({"notes": Notes, "broken": HalfACharacter})
    episodes = environments(named_prompts, 2, SEEDS)
    assert [episode.is_valid for episode in episodes] == [True, True, False, False, True, True]
    assert r"\ud800 is half of a character" in episodes[2].failure


def test_failed_episodes_lose_no_step_and_are_not_trained_on(make, prompts, tiny):
    size = 480
    environments = make(Faulty, timeout=3.0, max_turns=2)
    Faulty.injected.clear()
    episodes = environments(prompts, size, SEEDS)
    Faulty.is_over.set()
    injected = Counter(Faulty.injected)
    unclosed = injected.pop("close")
    failed = [episode for episode in episodes if not episode.is_valid]
    assert len(episodes) == 3 * size
    assert len(failed) == injected.total() > 1000
    assert set(injected) == set(Faulty.FAULTS)
    assert min(injected.values()) > 40
    assert Counter(episode.end for episode in failed)["timeout"] == injected["hang"]
    assert all(episode.failure and math.isnan(episode.reward) for episode in failed)
    scored = score_rollouts(prompts, episodes, RewardSum([]), tiny[1])
    valid = torch.tensor([episode.is_valid for episode in episodes], device="cpu").view(3, size)
    assert torch.equal(~scored.rewards.isnan(), valid)
    advantages = rlhf.GroupAdvantages()(scored.rewards)
    assert advantages[valid].view(-1).sum().abs() < 1e-9, "the mean is that of valid episodes"
    batches, terms, labels = scored.batches(advantages, GRPOLoss(), ParallelDims(), 4096)
    assert terms == labels == sum(episode.num_sampled for episode in episodes if episode.is_valid)
    trained = torch.cat([batch.labels[batch.labels >= 0] for batch in batches])
    expected = torch.cat(
        [episode.tokens[episode.prompt_len :][episode.mask] for episode in episodes if episode.is_valid]
    )
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

    for episode in make(Once)(prompts, 8, SEEDS):
        assert episode.calls <= 1
        assert episode.end == "completed" or episode.calls == 0

    longest = tiny[0].max_seq_len

    class Long(Notes):
        def note(self, text: str) -> str:
            """Note a text."""
            return "word " * (longest // 4)

    environments = make(Long, max_turns=50)
    episodes = environments(prompts, 3, SEEDS)
    assert any(episode.end == "context" for episode in episodes)
    assert all(len(episode.tokens) <= longest + 1 for episode in episodes)
    long = [Message(role="user", content="word " * longest)]
    (empty,) = environments([Prompt([1] * 9, {"start": ""}, 0, messages=long)], 1, [1])
    assert (empty.end, empty.num_sampled) == ("context", 0)


def test_a_column_selects_the_environment_and_invalid_environments_are_refused(make, prompts, tiny, caplog):
    class Other(Notes):
        def look(self, at: str) -> str:
            """Look at something."""
            return at

    both = make({"notes": Notes, "other": Other})
    assert "The chat template omits the definitions of tools" in caplog.text
    rows = []
    for prompt, name in zip(prompts, ("notes", "other", "notes"), strict=True):
        rows.append(replace(prompt, row={**prompt.row, "environment": name}))
    assert [episode.environment for episode in both(rows, 1, SEEDS)] == ["Notes", "Other", "Notes"]
    assert "The tools in the rows are not used" not in caplog.text
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with_tools = [replace(prompt, row={**prompt.row, "tools": tools}) for prompt in rows]
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
    (empty,) = make()([blank], 1, [1])
    assert (empty.num_sampled, empty.reward) == (0, None)


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
    batch_of_prompts = rlhf.collate_prompts(list(prompt_dataset(tokenizer, source=data)))
    sampler = LocalSampler(model, tokenizer, max_new_tokens=9, stop_tokens=STOP, max_sequences=6)
    environments = Environments(partial(Sights, tmp_path), sampler, tokenizer, max_turns=3, tool_format="by_length")
    episodes = environments(batch_of_prompts.prompts, 8, SEEDS)
    without_image = episodes[16:]
    assert {episode.end for episode in without_image} == {"environment_failed"}
    assert "image 2 of 2: the image" in without_image[0].failure
    assert "lost.png cannot be read (there is no such file)" in without_image[-1].failure
    episodes = episodes[:16]
    assert max(episode.turns for episode in episodes) == 3
    for episode in episodes:
        assert len(episode.images["encoder_input"]["images"].grids) == 2
    batch = collate_rollouts(episodes, [0.5] * len(episodes))
    assert len(batch.inputs["encoder_input"]["images"].grids) == 2 * 2  # the answers to a row share them
    sampled = torch.cat([episode.log_probs[episode.mask] for episode in episodes])
    with torch.no_grad():
        scores, labelled = token_scores(model, batch)
        images = batch.inputs["encoder_input"]["images"]
        batch.inputs["encoder_input"] = {"images": replace(images, pixels=images.pixels.flip(0))}
        scores_of_swapped_images, _ = token_scores(model, batch)
    torch.testing.assert_close(scores[labelled], sampled, atol=1e-4, rtol=0)
    assert (scores_of_swapped_images[labelled] - sampled).abs().max() > 1e-3
