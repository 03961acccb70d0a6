"""tune ls, and what a name that is no config is answered with."""

import itertools
import re

import pytest

import torchtune._recipe_registry
from torchtune._cli._find_recipe import families
from torchtune._cli.ls import List, overview
from torchtune._recipe_registry import get_all_recipes


def listed(out):
    """Names of the configs in the output of ``tune ls WORDS``."""
    return [line.split()[0] for line in out.splitlines() if line.startswith("  ")]


def test_all_shows_every_recipe_once_and_every_config(tune):
    lines = tune("ls", "--all").out.splitlines()
    assert lines[0] == f"{'RECIPE':<40} {'CONFIG':<40}"
    rows = [(line[:40].strip(), line[41:].strip()) for line in lines[1:]]
    recipes = [recipe.name for recipe in get_all_recipes()]
    assert [name for name, _ in rows if name] == recipes
    configs = [[config.name for config in recipe.configs] or [List.NULL_VALUE] for recipe in get_all_recipes()]
    assert [name for _, name in rows] == [name for names in configs for name in names]


def test_without_words_a_screen_names_all_recipes_and_families(tune):
    lines = tune("ls").out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    names = {line.split()[0] for line in lines if line.startswith("  ")}
    for recipe in get_all_recipes():
        stem = recipe.name.removesuffix("_single_device").removesuffix("_distributed")
        assert names & {recipe.name, f"{stem}_*"}
    assert all(f" {family}:{count}" in " ".join(lines) for family, count in families().items())
    assert any(re.match(r"  lora_finetune_\* +LoRA fine-tuning of a decoder: the weights stay", line) for line in lines)
    assert "tune ls --all" in tune("ls").out


def test_former_names_stand_below_their_recipe(monkeypatch):
    pairs = ["lora_dpo_single_device", "lora_dpo_distributed", "full_dpo_single_device", "full_dpo_distributed"]
    former = dict.fromkeys(pairs, "generate") | {"qat": "quantize"}
    monkeypatch.setattr(torchtune._recipe_registry, "_FORMER", former)
    lines = overview()
    below = {line.split()[0]: after.split() for line, after in itertools.pairwise(lines)}
    assert below["generate"] == ["also", "lora_dpo_*,", "full_dpo_*"]
    assert below["quantize"] == ["also", "qat"]


def test_all_words_must_describe_a_config_whatever_their_case(tune):
    assert listed(tune("ls", "QWEN3", "8b", "lora").out) == [
        "qwen3/8B_lora",
        "qwen3/8B_lora_single_device",
        "qwen3/14B_to_8B_KD_lora_single_device",
    ]
    assert listed(tune("ls", "qwen2.5", "7B", "full", "distributed").out) == ["qwen2_5/7B_full"]
    assert listed(tune("ls", "mistral/7B", "full", "single_device").out) == [
        "mistral/7B_full_low_memory",
        "mistral/7B_full_ppo_low_memory",
        "mistral/7B_v0.3_full_single_device",
    ]
    every = {config.name for recipe in get_all_recipes() for config in recipe.configs}
    alone, many = (set(listed(tune("ls", device).out)) for device in ("single_device", "distributed"))
    assert alone | many == every
    assert not alone & many
    assert "qat" in families() or all("_qat_" in name for name in listed(tune("ls", "qat").out))


def test_families_have_headings_and_sizes_their_order(tune):
    lines = tune("ls", "smol", "full_single_device").out.splitlines()
    assert lines[0] == "smol"
    assert listed("\n".join(lines)) == [f"smol/{size}_full_single_device" for size in ("135M", "360M", "1.7B")]
    lines = tune("ls", "qwen", "full").out.splitlines()
    headings = [line for line in lines[:-1] if not line.startswith("  ") and ":" not in line]
    assert headings == sorted({name.partition("/")[0] for name in listed("\n".join(lines))})
    assert len(headings) >= 7
    every = sum(len(recipe.configs) for recipe in get_all_recipes())
    assert lines[-1] == f"{len(listed(chr(10).join(lines)))} of {every} configs. To run one: tune run --config NAME"


def test_a_recipe_is_a_word_by_its_names_of_now_and_before(tune):
    renamed = [recipe for recipe in get_all_recipes() if recipe.former_names and recipe.configs]
    assert renamed
    for recipe in renamed:
        now = tune("ls", recipe.name)
        assert {config.name for config in recipe.configs} <= set(listed(now.out))
        assert f"\n{recipe.name}: also {', '.join(recipe.former_names)}\n" in now.out
        assert all(f"\n{recipe.name}: also" in tune("ls", name).out for name in recipe.former_names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qwn3"], "error: no config matches 'qwn3'; did you mean 'qwen3'?\n"),
        (["qwen3", "qlra"], "error: no config matches 'qlra'; did you mean 'qlora'?\n"),
        (
            ["xyzzy"],
            "error: no config matches 'xyzzy'; `tune ls` shows the families, for example `tune ls qwen3 8B lora`.\n",
        ),
        (["qwen3", "405B"], "error: no config matches all of qwen3, 405B: remove a word.\n"),
    ],
)
def test_words_that_describe_nothing_are_one_sentence(tune, words, message):
    result = tune("ls", *words)
    assert (result.code, result.out, result.err) == (2, "", message)


def test_all_takes_no_words(tune):
    result = tune("ls", "--all", "qwen3")
    assert result.code == 2
    assert "--all lists every config: remove it, or the words" in result.err


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3/8B_qlora", ["qwen3/8B_qlora_single_device", "qwen3/8B_lora"]),
        ("qwen2_5/32B_full", ["qwen2_5/32B_lora"]),
        ("gemma3/27B_full", ["gemma3/27B_lora_single_device", "gemma3/12B_full"]),
        ("lama3_1/8B_full", ["llama3_1/8B_full"]),
        ("qwen3/8B_fulll", ["did you mean 'qwen3/8B_full'?"]),
    ],
)
def test_a_name_that_is_no_config_is_answered_with_the_nearest(tune, name, nearest):
    result = tune("run", "--config", name)
    assert result.code == 2
    assert result.err.startswith(f"error: there is no config '{name}': ")
    assert len(result.err.splitlines()) == 1
    assert all(other in result.err for other in nearest)
