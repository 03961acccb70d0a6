"""Redact secrets: values from the environment, and values with the name or the format of a secret."""

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

REDACTED = "<redacted>"
# Shorter values of environment variables are not redacted: "1" or "true" would be replaced everywhere.
MIN_REDACTED = 6

# Names are split into words (``hfToken``, ``HF-TOKEN``, ``hf_token``). A name with "token" or "key" is a secret unless
# it has an innocent word (eos_token, text_key); a plural is a secret only with the word of an owner.
_SECRET_WORDS = set(
    "password passwd passphrase pwd secret secrets credential credentials apikey bearer authorization cookie "
    "htpasswd".split()
)
_OWNERS = set("access api auth aws azure client github hf hub huggingface openai private service session wandb".split())
_INNOCENT = set(
    "add answer attention audio begin bos cache chosen cls column completion content data dict end eos extra field "
    "first group header ignore image index input instruction json label last layer mask max message messages metric "
    "min model name new next num output pad patch per prompt public query question rejected response role row sep sort "
    "source special start state stop system target text think tile tool unk user value video weight".split()
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

_TOKEN_FORMATS = re.compile(
    r"""
    -----BEGIN[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----|\Z)
    | (?<![A-Za-z0-9])(?:
        hf_[A-Za-z0-9]{16,} | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{16,} | glpat-[\w-]{16,}
        | sk-(?:[A-Za-z0-9]+-){0,8}[A-Za-z0-9_]{16,} | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])
        | xox[abeoprs]-[\w-]{10,} | AIza[\w-]{35} | pypi-[\w-]{32,} | npm_[A-Za-z0-9]{32,}
        | eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]+)?
    )
    | (?i:(?<=bearer)|(?<=basic))[ ]+(?=\S*[0-9])[\w.~+/=-]{8,}
    | (?<=://)[^\s/?\#]{1,500}(?=@)
    | (?i:(?<=[?&](?:key|sig)=)|(?<=[?&](?:token)=)|(?<=[?&](?:api_key|api-key)=)|(?<=[?&]access_token=)
        |(?<=[?&](?:password)=)|(?<=[?&](?:signature)=)|(?<=x-amz-signature=))[^&\s'"\#]+
    """,
    re.VERBOSE | re.DOTALL,
)
# Value of each environment variable that a config of this process refers to -> the reference.
_environment: dict[str, str] = {}


@contextmanager
def record_environment() -> Iterator[set[str]]:
    """Record which variables ``${oc.env:NAME}`` reads inside the block, and their values for ``redact_secrets``."""
    from omegaconf.resolvers import oc

    names: set[str] = set()

    def read(name: str, *default: Any) -> Any:
        names.add(name)
        value = os.environ.get(name)
        if value:  # an empty value would be found in every text
            _environment[value] = f"${{oc.env:{name}}}"
        return oc.env(name, *default)

    _register_environment_resolver(read)
    try:
        yield names
    finally:
        _register_environment_resolver(oc.env)


def _register_environment_resolver(read: Callable[..., Any]) -> None:
    """Let OmegaConf read environment variables by a function."""
    from omegaconf import OmegaConf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the names oc.* are reserved
        OmegaConf.register_new_resolver("oc.env", read, replace=True)


def is_secret(key: str, value: object = "") -> bool:
    """Return whether a setting's name marks its value as a secret; for most names, only a text is a secret."""
    words = [word.lower() for word in _WORD.findall(key)]
    if not words or isinstance(value, bool) or value is None:
        return False
    compounds = {first + second for first, second in itertools.pairwise(words)}  # api_key -> apikey
    if _SECRET_WORDS & {*words, *compounds}:
        return True
    if isinstance(value, (int, float)):
        return False
    if words[-1] in ("tokens", "keys"):
        return not _OWNERS.isdisjoint(words)
    return words[-1] in ("token", "key", "pat", "auth") and _INNOCENT.isdisjoint(words)


def redact_tokens(text: str) -> str:
    """Redact everything in ``text`` with the format of a token, a private key or a URL's password."""
    return _TOKEN_FORMATS.sub(_replacement, text)


def _replacement(match: re.Match[str]) -> str:
    """Return the text in the place of a token; of a URL's user and password, the user stays."""
    secret = match[0]
    if secret.startswith(" "):  # after "bearer" or "basic"
        return f" {REDACTED}"
    if not match.string.endswith("://", 0, match.start()):
        return REDACTED
    user, colon, _ = secret.partition(":")
    if colon:
        return f"{user}:{REDACTED}"
    if len(secret) >= 16:  # https://name@host: a short name is a user's, a long one is a token
        return REDACTED
    return secret


def redact_secrets(text: str) -> str:
    """Return a text without secrets: values of environment variables that configs read, and tokens by their format.

    Example:
        >>> torchtune.config.redact_secrets("the key is hf_" + "a" * 34)
        'the key is <redacted>'
    """
    # Longer values first: a value may contain another one.
    for value in sorted(_environment, key=len, reverse=True):
        if len(value) < MIN_REDACTED:
            continue
        text = text.replace(repr(value)[1:-1], _environment[value])  # as a message quotes it, with escapes
        text = text.replace(value, _environment[value])
    return redact_tokens(text)


def environment_reference(value: object) -> str | None:
    """Return the reference ``${oc.env:NAME}`` that has this value, if any."""
    if not isinstance(value, str):
        return None
    return _environment.get(value)


def escape(value: Any) -> Any:
    """Escape every ``${`` in ``value``, so that it is literal."""
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    if type(value) is not str:  # a subclass of str is a reference that is kept
        return value
    # OmegaConf halves the backslashes before "${", so they are doubled, and one more escapes the brace.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
