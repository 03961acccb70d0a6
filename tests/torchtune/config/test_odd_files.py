"""Odd files: aliases, tags and references are read, or are one sentence with file and line."""

from pathlib import Path

import pytest

from torchtune.config import ConfigError, load_and_check

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
ODD = {
    "billion laughs": (BOMB, "holds more than 20,000 values"),
    "brackets": ("a: " + "[" * 5000 + "]" * 5000, "nests more than 64 levels deep"),
    "long text": ("a: " + "x" * 2_000_000, "is longer than 1 MiB"),
    "long text, cut within a character": ("a:  " + "é" * 1_000_000, "is longer than 1 MiB"),
    "circle": ("a: ${b}\nb: ${c}\nc: ${a}\n", "it refers to itself"),
    "many mistakes": ("".join(f"a{i}: {{_component_: no.such.thing{i}}}\n" for i in range(400)), "50 mistakes or more"),
    "tagged int": ("a: 1\nb: !!int x", "c.yaml:2: 'x' is no int"),
    "tagged bool": ("a: !!bool x", "'x' is no bool"),
    "python object": ("a: !!python/object/apply:os.system ['touch here']", "tag '!!python/object/apply:os.system'"),
    "binary": ("a: !!binary aGk=", "tag '!!binary'"),
    "control character": ("a: \x07", "control characters are not allowed"),
    "no keys": ("[a]: 1", "not a plain name"),
    "undefined alias": ("a: *x", "found undefined alias"),
    "other version": ("%YAML 9.9\n---\na: 1", "incompatible YAML document"),
}


def message_of(tmp_path: Path, text: str, *overrides: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_and_check(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", ODD)
def test_a_file_that_is_no_config_is_refused_in_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, words = ODD[name]
    message = message_of(tmp_path, text)
    assert words in message
    assert "c.yaml" in message
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_nesting_of_64_levels_is_read(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: " + "[" * 63 + "]" * 63)
    load_and_check(path)
    assert "nests more than 64 levels deep" in message_of(tmp_path, "a: " + "[" * 64 + "]" * 64)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("a={x: 1, x: 2}", "command line: a: x: is given twice"),
        ("a=[!!python/name:os.system ]", "a: '[!!python/name:os.system ]' is not a complete list"),
        ("a..b=1", "command line: a..b: needs a key"),
        ("~", "command line: ~: needs a key"),
    ],
)
def test_an_override_that_cannot_be_read_is_refused_in_one_sentence(override, words, tmp_path):
    assert words in message_of(tmp_path, "", override)


def test_files_of_other_systems_are_read(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes("\ufeffa: ü\r\nb:\r\n  c: '${a}'\r\n".encode())
    assert dict(load_and_check(path)) == {"a": "ü", "b": {"c": "ü"}}


def test_aliases_of_one_anchor_are_changed_apart(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: &x {lr: 1}\nb: *x\n")
    assert dict(load_and_check(path, ["b.lr=2"])) == {"a": {"lr": 1}, "b": {"lr": 2}}


def test_references_in_any_order_and_of_any_kind_are_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("SIZE", "3")
    path = tmp_path / "c.yaml"
    path.write_text(
        "z: ${y}\ny: ${x}/y\nx: ${s.name}\ns: {name: n, same: '${.name}', other: '${..z}'}\nall: ${s}\n"
        "size: ${oc.decode:${oc.env:SIZE}}\npick: ${s.${which}}\nwhich: other\nname: ${oc.select:nothing,else}\n"
        "names: ${oc.dict.keys:s}\nrow: [a, '${row2.0}']\nrow2: [b, c]\nitem: ${row2[1]}\nplain: \\${x}\n"
    )
    settings = load_and_check(path)
    assert settings.z == settings.all.other == settings.s.other == settings.pick == "n/y"
    assert settings.s.same == "n"
    assert (settings.size, settings.name, settings.item, settings.row[1]) == (3, "else", "c", "b")
    assert list(settings.names) == ["name", "same", "other"]
    assert settings.plain == "${x}"


def test_override_of_a_number_replaces_the_entry_with_that_number(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: {0: x, 1: y}\nb: {'2': z}\n")
    cfg = load_and_check(path, ["a.0=changed", "a.7=added", "b.2=changed"])
    assert dict(cfg.a) == {0: "changed", 1: "y", "7": "added"}
    assert dict(cfg.b) == {"2": "changed"}
