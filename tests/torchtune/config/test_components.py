# ruff: noqa: E501 (messages and tables stand in one piece)
"""Which arguments callables accept, through ``**kwargs``."""

import functools
from typing import Any, Protocol

import pytest
import torch

from tests.torchtune.config.assets import parts
from torchtune.config._components import accepts
from torchtune.models.phi4 import phi4_tokenizer


def leaf(a: int, b: str = "", *, c: float = 0.0) -> None: ...


def other(d: int = 0) -> None: ...


def one_call(**kwargs: Any) -> None:
    return leaf(1, **kwargs)


def two_branches(flag: bool, **kwargs: Any) -> None:
    return leaf(**kwargs) if flag else other(**kwargs)


def named_already(**kwargs: Any) -> None:
    leaf(a=1, b="x", **kwargs)


def takes_out(**kwargs: Any) -> None:
    kwargs.pop("x")
    if "y" in kwargs:
        kwargs["z"] = 1
    other(**kwargs)


def swallows(a: int = 0, **kwargs: Any) -> None: ...


def passes_as_a_whole(**kwargs: Any) -> None:
    print(kwargs)


def to_a_variable(function: Any, **kwargs: Any) -> None:
    function(**kwargs)


def imports_inside(**kwargs: Any) -> Any:
    from torch.optim import SGD

    return SGD([], **kwargs)


def to_a_partial(**kwargs: Any) -> Any:
    return functools.partial(leaf, 1, **kwargs)


def prepared_first(**kwargs: Any) -> None:
    first, prepared = divmod(1, kwargs)
    leaf(first, **prepared)


def needs_what_is_not_there(**kwargs: Any) -> Any:
    from no_such_package import init

    return init(**kwargs)


def loads(**kwargs: Any) -> Any:
    import datasets

    return datasets.load_dataset("json", **kwargs)


def wrapped(function: Any) -> Any:
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Base:
    def __init__(self, size: int, depth: int = 1) -> None: ...

    @classmethod
    def make(cls, **kwargs: Any) -> "Base":
        return cls(**kwargs)


class Child(Base):
    def __init__(self, extra: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Grandchild(Child):
    pass


class Face(Protocol):
    def act(self) -> None: ...


class BelowAProtocol(Face):
    pass


@pytest.mark.parametrize(
    ("target", "names", "required"),
    [
        (leaf, {"a", "b", "c"}, {"a"}),
        (one_call, {"b", "c"}, set()),
        (two_branches, {"flag", "a", "b", "c", "d"}, {"flag"}),
        (named_already, {"c"}, set()),
        (takes_out, {"x", "y", "z", "d"}, set()),
        (swallows, {"a"}, set()),
        (prepared_first, {"b", "c"}, set()),
        (to_a_partial, {"b", "c"}, set()),
        (functools.partial(leaf, 1, c=2.0), {"b", "c"}, set()),
        (functools.partial(leaf, b=""), {"a", "b", "c"}, {"a"}),
        (wrapped(leaf), {"a", "b", "c"}, {"a"}),
        (Child, {"extra", "size", "depth"}, {"size"}),
        (Grandchild, {"extra", "size", "depth"}, {"size"}),
        (BelowAProtocol, set(), set()),
        (Base.make, {"size", "depth"}, {"size"}),
        (phi4_tokenizer, {"vocab_path", "merges_path", "special_tokens_path", "max_seq_len", "prompt_template", "truncation_type"}, {"vocab_path", "merges_path"}),
        (parts.alpaca_like, {"tokenizer", "source", "column_map", "packed", "split", "filter_fn", "name", "streaming"}, {"tokenizer"}),
    ],
)  # fmt: skip
def test_accepted_and_required_arguments_are_followed_through_calls(target, names, required):
    accepted = accepts(target)
    assert not accepted.takes_any_name
    assert set(accepted.named) == names
    assert {name for name, argument in accepted.named.items() if argument.required} == required


@pytest.mark.parametrize("target", [passes_as_a_whole, to_a_variable, needs_what_is_not_there, dict])
def test_signature_that_cannot_be_followed_accepts_any_argument(target):
    assert accepts(target).takes_any_name


def test_arguments_of_a_function_that_is_imported_in_the_body_are_followed():
    accepted = accepts(imports_inside)
    assert {"lr", "momentum", "nesterov"} <= set(accepted.named)
    assert "params" not in accepted.named


def test_readers_of_files_are_known_behind_load_dataset():
    accepted = accepts(loads)
    assert not accepted.takes_any_name
    assert {"data_files", "split", "field", "delimiter", "sep", "columns", "sample_by", "keep_linebreaks"} <= set(
        accepted.named
    )
    assert "path" not in accepted.named
    assert "packed" not in accepted.named


def test_the_datasets_package_is_asked_for_names_that_are_not_known_alone():
    few = accepts(loads, ["split", "data_files"])
    assert few.is_incomplete
    assert few.named.keys() < accepts(loads).named.keys()
    assert accepts(loads, ["split", "delimiter"]).named.keys() == accepts(loads).named.keys()


def test_positional_arguments_pass_through_a_wrapper():
    assert accepts(wrapped(leaf)).order == ["a", "b"]


def test_signature_of_a_torch_optimizer_is_read():
    accepted = accepts(torch.optim.AdamW)
    assert accepted.order[0] == "params"
    assert not accepted.takes_any_name
