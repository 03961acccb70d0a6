# ruff: noqa: E501 (tables stand in one piece)
"""Secrets stay out of everything that is written: by where they came from, by name, by shape."""

import dataclasses
import logging
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from tests.torchtune.config.assets import typed_recipe
from torchtune.config import load_and_check, log_config, save_config
from torchtune.config._secrets import REDACTED, is_secret, redact_secrets, redact_tokens

Check = Callable[..., typed_recipe.Settings]
VALUE = "s3cr3t \"value\" of '97\\' bytes"


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("MY_VALUE", VALUE)


@pytest.mark.usefixtures("environment")
def test_a_value_of_the_environment_is_saved_as_it_was_written(check, tmp_path, caplog):
    overrides = (
        "prompt={direct: '${oc.env:MY_VALUE}', by_reference: '${prompt.direct}', part: 'a-${prompt.by_reference}'}"
    )
    settings = check(overrides)
    assert settings.prompt == {"direct": VALUE, "by_reference": VALUE, "part": f"a-{VALUE}"}
    save_config(settings, tmp_path / "saved.yaml")
    text = (tmp_path / "saved.yaml").read_text()
    assert "s3cr3t" not in text
    assert yaml.safe_load(text)["prompt"] == {
        "direct": "${oc.env:MY_VALUE}",
        "by_reference": "${prompt.direct}",
        "part": "a-${prompt.by_reference}",
    }
    assert load_and_check(tmp_path / "saved.yaml", [], typed_recipe.recipe_main) == settings
    with caplog.at_level(logging.INFO, logger="torchtune"):
        log_config("typed_recipe", settings)
    assert "MY_VALUE" in caplog.text
    assert "s3cr3t" not in caplog.text
    # copied without what the config said of it
    save_config(dataclasses.replace(settings), tmp_path / "copy.yaml")
    assert yaml.safe_load((tmp_path / "copy.yaml").read_text())["prompt"]["direct"] == "${oc.env:MY_VALUE}"
    settings.prompt["direct"] = "changed by hand"
    save_config(settings, tmp_path / "changed.yaml")
    assert yaml.safe_load((tmp_path / "changed.yaml").read_text())["prompt"]["direct"] == "changed by hand"


@pytest.mark.usefixtures("environment")
def test_a_section_with_a_value_of_the_environment_is_saved_as_it_was_written(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "a: {key: '${oc.env:MY_VALUE}', n: [1, '${oc.env:MY_VALUE}']}\nb: ${a}\nc: '${b.n[1]}'\nd: \\${x}\n"
    )
    cfg = load_and_check(path, [], DictConfig)
    assert (cfg.b.key, cfg.c, cfg.a.n[1], cfg.d) == (VALUE, VALUE, VALUE, "${x}")
    for number in range(2):
        save_config(cfg, tmp_path / f"{number}.yaml")
        assert "s3cr3t" not in (tmp_path / f"{number}.yaml").read_text()
        cfg = load_and_check(tmp_path / f"{number}.yaml", [], DictConfig)
        assert (cfg.b.key, cfg.c, cfg.a.n[1], cfg.d) == (VALUE, VALUE, VALUE, "${x}")
    assert (tmp_path / "0.yaml").read_text() == (tmp_path / "1.yaml").read_text()
    user_config = OmegaConf.create({"a": "${oc.env:MY_VALUE}", "b": {"c": "${a}"}, "d": "${e}", "e": 1})
    save_config(user_config, tmp_path / "own.yaml")
    saved = yaml.safe_load((tmp_path / "own.yaml").read_text())
    assert saved == {"a": "${oc.env:MY_VALUE}", "b": {"c": "${a}"}, "d": 1, "e": 1}


@pytest.mark.usefixtures("environment")
def test_errors_quote_no_value_of_the_environment(mistakes, monkeypatch):
    monkeypatch.setenv("SHORT", "x7")
    monkeypatch.setenv("LONG", " ".join(["s3cr3t"] * 40))
    messages = mistakes(
        "batch_size=${oc.env:MY_VALUE}",
        "lr=${oc.env:SHORT}",
        "dtype=${oc.env:LONG}",
        "seed=${${oc.env:MY_VALUE}}",
        "${oc.env:MY_VALUE}=1",
        f"prompt={{user: [{VALUE}",
        "optimizer._component_=torch.${oc.env:MY_VALUE}",
    )
    assert len(messages) >= 5
    assert not [message for message in messages if "s3cr3t" in message or "x7" in message]
    assert any("batch_size: must be int >= 1, not ${oc.env:MY_VALUE} (str)" in message for message in messages)


def test_errors_quote_no_secret_that_was_typed(mistakes):
    token = "hf_" + "aB3" * 8
    messages = mistakes(f"batch_size={token}", f"hub_token=[{token}", "hub_token={api_key: hunter2", f"{token}=1", "hub_token=[hunter2]")  # fmt: skip
    assert len(messages) >= 3
    assert not [message for message in messages if token in message or "hunter2" in message]


SECRETS = [
    "token", "hf_token", "HF_TOKEN", "hfToken", "wandb_api_key", "apikey", "apiKey", "db_password", "client_secret",
    "auth_token", "auth-token", "key", "ssh_key", "access-key", "encryption_key", "auth", "basic_auth", "bearer",
    "credentials", "passphrase", "aws_secret_access_key", "private_keys", "api_tokens", "proxy-authorization", "pwd",
]  # fmt: skip
INNOCENT = [
    "tokenizer", "max_tokens", "max_new_tokens", "eos_token", "pad_token_id", "num_tokens", "special_tokens_path",
    "keyword", "keywords", "num_key_heads", "num_key_value_heads", "tokens", "token_ids", "keys", "key_padding_mask",
    "author", "monkey", "authored_by", "text_key", "label_key", "sort_key", "tokens_per_second", "secretary",
    "trainable_token_indices", "add_bos_token", "image_token", "passes", "key_proj",
]  # fmt: skip


@pytest.mark.parametrize("key", SECRETS)
def test_names_of_secrets_are_recognized(key):
    assert is_secret(key, "x")


@pytest.mark.parametrize("key", INNOCENT)
def test_innocent_names_mark_no_secret(key):
    assert not is_secret(key, "x")
    assert not is_secret(key, 3)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("hf_AbCdEfGhIjKlMnOpQrStUvWx", "|"),
        ("sk-proj-Ab12Cd34Ef56Gh78Ij90", "|"),
        ("sk-ant-api03-Ab12Cd34Ef56Gh78Ij90Kl12", "|"),
        ("ghp_0123456789abcdefABCDEF0123456789abcd", "|"),
        ("github_pat_11ABCDEFG0abcdefghijkl_mnop", "|"),
        ("AKIAIOSFODNN7EXAMPLE", "|"),
        ("xoxb-123456789012-abcdefGHIJKL", "|"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P", "|"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----", "|"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn", "|"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer |"),
        ("a hf_AbCdEfGhIjKlMnOpQrStUvWx b", "a | b"),
        ("https://me:hunter2@example.org/x", "https://me:|@example.org/x"),
        ("postgresql://me:hun@ter2@db:5432/x", "postgresql://me:|@db:5432/x"),
        ("https://example.org/x?token=abc&y=1", "https://example.org/x?token=|&y=1"),
        ("s3://b/k?X-Amz-Signature=0123abcd", "s3://b/k?X-Amz-Signature=|"),
    ],
)
def test_secrets_are_redacted_by_their_format(text, left):
    assert redact_tokens(text) == left.replace("|", REDACTED)


@pytest.mark.parametrize(
    "text",
    [
        "hf_format", "hf_llama3_2_checkpoint_format", "/data/sk-learn-datasets-v1-2020", "risk-averse-model-0123456789abcdef",
        "https://huggingface.co/owner/name", "owner/name@main", "me@example.org", "torch.optim.AdamW", "Bearer of news",
        "3b18e512dba79e4c8300dd08aeb37f8e728b8dad", "git@github.com:owner/name.git", "eyJust.a.name", "",
        "https://git@example.org/x", "basic training", "<|start_header_id|>user",
    ],
)  # fmt: skip
def test_innocent_texts_are_not_redacted(text):
    assert redact_tokens(text) == text


def test_secrets_in_lists_and_below_their_name(tmp_path):
    token = "hf_" + "aB3" * 8
    cfg = OmegaConf.create(
        {
            "loggers": [{"api_key": "k"}, {"password": 123456, "tokens": ["a", "b"], "url": "https://u:p@h/x"}],
            "credentials": {"user": "me", "list": [["x"]], "n": 3, "_component_": "a.b"},
            "args": ["--token", token, {"pass": "ok"}],
            "pad_token": "<pad>", "key": None, "auth": "", "hf_token": 0, "api_keys": ["one", "two"],
        }
    )  # fmt: skip
    save_config(cfg, tmp_path / "saved.yaml")
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text()) == {
        "loggers": [
            {"api_key": REDACTED},
            {"password": REDACTED, "tokens": ["a", "b"], "url": f"https://u:{REDACTED}@h/x"},
        ],
        "credentials": {"user": REDACTED, "list": [[REDACTED]], "n": REDACTED, "_component_": "a.b"},
        "args": ["--token", REDACTED, {"pass": "ok"}],
        "pad_token": "<pad>", "key": None, "auth": "", "hf_token": 0, "api_keys": [REDACTED, REDACTED],
    }  # fmt: skip


def test_saved_configs_are_readable_by_their_owner_alone(check, tmp_path):
    save_config(check(), tmp_path / "saved.yaml")
    assert stat.S_IMODE((tmp_path / "saved.yaml").stat().st_mode) == 0o600


def test_nothing_of_a_shipped_config_is_taken_for_a_secret():
    root = Path(__file__).parents[3] / "recipes" / "configs"
    for path in sorted(root.rglob("*.yaml")):
        text = path.read_text()
        assert redact_tokens(text) == text
        for line in text.splitlines():
            key, colon, value = line.strip().lstrip("- ").partition(":")
            assert not (colon and value.strip() and is_secret(key, value)), line


def test_errors_are_redacted_in_the_middle_of_a_sentence():
    assert redact_secrets("no access with hf_" + "aB3" * 8) == f"no access with {REDACTED}"


@pytest.mark.parametrize(("value", "saved"), [("k3yk3", "k3yk3"), ("k3yk3y", "${oc.env:MY_VALUE}")])
def test_only_a_value_that_is_too_short_for_a_secret_is_saved_itself(value, saved, check, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_VALUE", value)
    settings = check("prompt={direct: '${oc.env:MY_VALUE}'}")
    save_config(dataclasses.replace(settings), tmp_path / "copy.yaml")
    assert yaml.safe_load((tmp_path / "copy.yaml").read_text())["prompt"]["direct"] == saved
