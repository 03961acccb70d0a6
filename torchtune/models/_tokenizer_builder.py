"""Builders of tokenizers: functions with the arguments of a tokenizer class that YAML can express."""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torchtune.data import TemplateType, get_prompt_template
from torchtune.models._builders import named_function
from torchtune.tokenizers import parse_hf_tokenizer_json

Tokenizer = TypeVar("Tokenizer")

# Arguments that every builder takes by position, because builders of earlier releases did.
_POSITIONAL = ("prompt_template", "truncation_type")
_TEMPLATE_DOC = "prompt_template: dotted path of a template, or a mapping role -> [text before, text after]."


def tokenizer_builder(
    tokenizer: type[Tokenizer], name: str, title: str, *, first: str = "path", **defaults: Any
) -> Callable[..., Tokenizer]:
    """Make the builder of a tokenizer class, with the arguments that YAML can express.

    ``special_tokens`` becomes ``special_tokens_path``; ``prompt_template`` becomes a dotted path or a mapping.

    Args:
        tokenizer: class of the tokenizer.
        name: name of the new function.
        title: name of the family in docstrings.
        first: argument that comes first in the builder.
        **defaults: arguments with a default that differs from the class.
    """
    class_parameters = inspect.signature(tokenizer).parameters
    argument_docs = _argument_docs(tokenizer)
    parameters = []
    docs = {}
    for argument in dict.fromkeys([first, *class_parameters]):  # each once, with ``first`` in front
        parameter = class_parameters[argument]
        doc = argument_docs[argument]
        if argument == "special_tokens":
            parameter = parameter.replace(name="special_tokens_path", default=None, annotation=str | None)
            doc = f"special_tokens_path: path of a ``tokenizer.json`` with special tokens that replace {title}'s."
        elif argument == "prompt_template":
            default = None
            if parameter.default is not None:  # an object, of which YAML can only express the path of its class
                template = type(parameter.default)
                default = f"{template.__module__}.{template.__name__}"
            parameter = parameter.replace(default=default, annotation=TemplateType | None)
            doc = _TEMPLATE_DOC
        if argument in _POSITIONAL:  # even if the class takes it by keyword alone
            parameter = parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if argument in defaults:
            parameter = parameter.replace(default=defaults[argument])
        parameters.append(parameter)
        docs[parameter.name] = doc
    parameters.sort(key=lambda parameter: parameter.kind)  # a stable sort: keyword-only arguments come last
    signature = inspect.Signature(parameters, return_annotation=tokenizer)

    def builder(*args: Any, **kwargs: Any) -> Tokenizer:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        special_tokens_path = settings.pop("special_tokens_path", None)
        if special_tokens_path is not None:
            settings["special_tokens"] = parse_hf_tokenizer_json(special_tokens_path)
        settings["prompt_template"] = get_prompt_template(settings["prompt_template"])
        return tokenizer(**settings)

    builder.__signature__ = signature
    doc = f"Build the tokenizer of {title}.\n\n    Args:"
    for parameter in parameters:
        doc += f"\n        {docs[parameter.name]}"
    doc += "\n\n    Raises:\n        DataError: a file is missing or broken.\n    "
    return named_function(builder, name, tokenizer.__module__, doc)


def with_defaults(init: Callable[..., None], **defaults: Any) -> Callable[..., None]:
    """Return a constructor with other defaults, for a subclass."""
    init_signature = inspect.signature(init)
    parameters = []
    for name, parameter in init_signature.parameters.items():
        if name in defaults:
            parameter = parameter.replace(default=defaults[name])
        parameters.append(parameter)
    signature = init_signature.replace(parameters=parameters)

    @wraps(init)
    def __init__(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        init(*bound.args, **bound.kwargs)

    __init__.__signature__ = signature
    return __init__


def _argument_docs(tokenizer: type) -> dict[str, str]:
    """Return argument -> its entry in the ``Args`` section of the class or of a base class."""
    docs = {}
    for base in reversed(tokenizer.__mro__):
        section = (inspect.getdoc(base) or "").partition("Args:")[2].partition("\n\n")[0]
        # An entry starts at an indent of four; lines with a deeper indent continue it.
        for entry in re.split(r"\n    (?! )", section)[1:]:
            docs[entry.partition(":")[0]] = entry.replace("\n", "\n    ")
    return docs
