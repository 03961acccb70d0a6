"""Builders of tokenizers for YAML, made from the signatures and docstrings of their classes."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torchtune.data import TemplateType, get_prompt_template
from torchtune.models._builders import dress
from torchtune.tokenizers import parse_hf_tokenizer_json

T = TypeVar("T")
_SETTINGS = ("prompt_template", "truncation_type")  # positional in every builder
_TEMPLATE_DOC = "prompt_template: dotted path of a template, or a mapping role -> [text before, text after]."


def tokenizer_builder(
    tokenizer: type[T], name: str, title: str, *, first: str = "path", **defaults: Any
) -> Callable[..., T]:
    """Make the builder of a tokenizer class, with the arguments that YAML can express.

    ``special_tokens`` becomes ``special_tokens_path``; ``prompt_template`` becomes a dotted path or a mapping.

    Args:
        tokenizer: class of the tokenizer.
        name: name of the new function.
        title: name of the family in docstrings.
        first: argument that comes first in the builder.
        **defaults: arguments with a default that differs from the class.
    """
    special_doc = f"special_tokens_path: path of a ``tokenizer.json`` with special tokens that replace {title}'s."
    found, documented = [], _documented(tokenizer)
    own = inspect.signature(tokenizer).parameters
    for key in dict.fromkeys([first, *own]):
        parameter, doc = own[key], documented[key]
        if key == "special_tokens":
            parameter = parameter.replace(name="special_tokens_path", default=None, annotation=str | None)
            doc = special_doc
        elif key == "prompt_template":
            default = parameter.default and _dotted(type(parameter.default))
            parameter, doc = parameter.replace(default=default, annotation=TemplateType | None), _TEMPLATE_DOC
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if key in _SETTINGS else parameter.kind
        found.append((parameter.replace(kind=kind, default=defaults.get(key, parameter.default)), doc))
    found.sort(key=lambda pair: pair[0].kind)
    signature = inspect.Signature([parameter for parameter, _ in found], return_annotation=tokenizer)

    def builder(*args: Any, **kwargs: Any) -> T:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        special_tokens_path = settings.pop("special_tokens_path", None)
        if special_tokens_path is not None:
            settings["special_tokens"] = parse_hf_tokenizer_json(special_tokens_path)
        settings["prompt_template"] = get_prompt_template(settings["prompt_template"])
        return tokenizer(**settings)

    builder.__signature__ = signature
    listed = "".join(f"\n        {doc}" for _, doc in found)
    raises = "\n\n    Raises:\n        DataError: a file is missing or broken.\n    "
    return dress(builder, name, tokenizer.__module__, f"Build the tokenizer of {title}.\n\n    Args:{listed}{raises}")


def with_defaults(init: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Return a constructor with other defaults, for a subclass."""
    own = inspect.signature(init)
    signature = own.replace(
        parameters=[p.replace(default=defaults.get(key, p.default)) for key, p in own.parameters.items()]
    )

    @wraps(init)
    def __init__(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        init(*bound.args, **bound.kwargs)

    __init__.__signature__ = signature
    return __init__


def _documented(tokenizer: type) -> dict[str, str]:
    """Return argument -> its entry in the ``Args`` section of the class or of a base class."""
    found = {}
    for base in reversed(tokenizer.__mro__):
        listed = (inspect.getdoc(base) or "").partition("Args:")[2].partition("\n\n")[0]
        entries = re.split(r"\n    (?! )", listed)[1:]
        found |= {entry.partition(":")[0]: entry.replace("\n", "\n    ") for entry in entries}
    return found


def _dotted(template: type) -> str:
    return f"{template.__module__.rpartition('.')[0]}.{template.__name__}"
