"""Configs that attack: bombs, depths, odd numbers and tags are one sentence with file and line, at once."""

from pathlib import Path

import pytest

from tests.work import at_most
from torchtune.config import ConfigError, load_and_check


def chain(first: str, line: str, count: int = 31) -> str:
    """``first``, then ``line`` with ``{i}`` its number and ``{b}`` the one before."""
    return first + "".join(line.format(i=i, b=i - 1) for i in range(1, count))


TEN = ", ".join(["*a{b}"] * 10)
BOMBS = {
    "billion laughs": (
        chain("a0: &a0 [x, x]\n", f"a{{i}}: &a{{i}} [{TEN}]\n", 9),
        "holds more than 20,000 keys and values",
    ),
    "merged laughs": (
        chain("a0: &a0 {x: 1}\n", f"a{{i}}: &a{{i}} {{{{<<: [{TEN}]}}}}\n", 12),
        "holds more than 20,000",
    ),
    "deep by aliases": (chain("a0: &a0 [x]\n", "a{i}: &a{i} [*a{b}]\n", 5000), "c.yaml:64: nests more than 64 levels"),
    "brackets": ("a: " + "[" * 200_000, "c.yaml:1: nests more than 64 levels deep"),
    "braces": ("a: " + "{" * 200_000, "nests more than 64 levels deep"),
    "dashes": ("- " * 100_000, "nests more than 64 levels deep"),
    "many values": ("a:\n" + "- 1\n" * 100_000, "holds more than 20,000 keys and values"),
    "long text": ("a: " + "x" * 2_000_000, "is longer than 1 MiB"),
    "doublings": (chain("a0: xxxxxxxx\n", "a{i}: '${{a{b}}}${{a{b}}}'\n"), "stand for is longer than 262,144"),
    "doubled lists": (chain("a0: [x]\n", "a{i}: ['${{a{b}}}', '${{a{b}}}']\n"), "stand for is longer than 262,144"),
    "doublings in a section": (
        "s:\n" + chain("  a0: xxxxxxxx\n", "  a{i}: '${{.a{b}}}${{.a{b}}}'\n"),
        "stand for is longer than 262,144",
    ),
    "doublings by look-up": (
        chain("a0: xxxxxxxx\n", "a{i}: '${{oc.select:a{b}}}${{oc.select:a{b}}}'\n"),
        "stand for is longer than 262,144",
    ),
    "doublings that are decoded": (
        chain("a0: xxxxxxxx\n", """a{i}: '${{oc.decode:"\\${{a{b}}}\\${{a{b}}}"}}'\n"""),
        "stand for is longer than 262,144",
    ),
    "names made of references": (
        "s:\n" + chain("  a0: xxxxxxxx\n", "  k{i}: a{b}\n  a{i}: '${{s.${{.k{i}}}}}${{s.${{.k{i}}}}}'\n"),
        "it refers to itself",
    ),
    "a false order": (
        chain("a0: xxxxxxxx\n", "a{i}: '${{a{b}}}${{a{b}}}${{oc.select:b{i},1}}'\n") + chain("", "b{i}: ${{a{i}}}\n"),
        "it refers to itself",
    ),
    "nested references": ("a: '" + "${" * 3000 + "}" * 3000 + "'\n", "is too much"),
    "brackets to decode": ("a: '${oc.decode:\"" + "[" * 3000 + "\"}'\n", "it nests too deep"),
    "depth by references": (
        chain("a0: [x]\n", "a{i}: [[[[[[[[[['${{a{b}}}']]]]]]]]]]\n", 9),
        "nests more than 64 levels deep",
    ),
    "circle": ("a: ${b}\nb: ${c}\nc: ${a}\n", "it refers to itself"),
    "long chain backward": (chain("", "a{b}: ${{a{i}}}\n", 500), "refer to one another in a row"),
    "many mistakes": (
        "".join(f"a{i}: {{_component_: no.such.thing{i}}}\n" for i in range(4000)),
        "50 mistakes or more",
    ),
    "long int": ("a: " + "9" * 100_000, "is no int of at most 64 bits"),
    "int of 65 bits": ("a: 18446744073709551616", "is no int of at most 64 bits"),
    "int of base 60": ("a: " + "1:" * 100_000 + "1", "is no int of at most 64 bits"),
    "float beyond all": ("a: 1e999", "'1e999' is no float of at most 64 bits"),
    "tagged int": ("a: 1\nb: !!int x", "c.yaml:2: 'x' is no int"),
    "tagged bool": ("a: !!bool x", "'x' is no bool"),
    "python object": ("a: !!python/object/apply:os.system ['touch here']", "tag '!!python/object/apply:os.system'"),
    "binary": ("a: !!binary aGk=", "tag '!!binary'"),
    "set": ("a: !!set {x, y}", "tag '!!set'"),
    "control character": ("a: \x07", "control characters are not allowed"),
    "no keys": ("[a]: 1", "not a plain name"),
    "undefined alias": ("a: *x", "found undefined alias"),
    "other version": ("%YAML 9.9\n---\na: 1", "incompatible YAML document"),
}


def attack(tmp_path: Path, text: str, *overrides: str) -> str:
    """The message about ``text``, after little work and by no other exception."""
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught, at_most(10**7, mib=64):
        load_and_check(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_file_is_one_sentence_at_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, words = BOMBS[name]
    message = attack(tmp_path, text)
    assert words in message
    assert len(message) < 30_000
    assert "c.yaml" in message
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["a=" + "[" * 100_000], "command line: a: nests more than 64 levels deep"),
        (["a={b: [" + "{c: " * 100], "command line: a: nests more than 64 levels deep"),
        (["a=[&a [x, x], *a, &b [*a, *a], " + "*b, " * 9000 + "]"], "a: holds more than 20,000 keys and values"),
        ([".".join("a" * 3000) + "=1"], "nests more than 64 levels deep"),
        (chain("a0=xxxxxxxx", "\na{i}=${{a{b}}}${{a{b}}}").split("\n"), "stand for is longer than 262,144"),
        (["a={x: 1, x: 2}"], "command line: a: x: is given twice"),
        (["a=" + "9" * 9999], "a: '999999999999999999999999999999999999999999999999999999999999…' is no int"),
        (["a=[!!python/name:os.system ]"], "a: '[!!python/name:os.system ]' is not a complete list"),
        (["a=\udcff"], "command line: a: is not UTF-8 text"),
        (["="], "command line: =: needs a key"),
        (["a..b=1"], "command line: a..b: needs a key"),
        (["~"], "command line: ~: needs a key"),
    ],
)
def test_a_hostile_override_is_one_sentence_at_once(overrides, words, tmp_path):
    assert words in attack(tmp_path, "", *overrides)


def test_files_of_other_systems_are_read(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes("\ufeffa: ü\r\nb:\r\n  c: '${a}'\r\n".encode())
    assert dict(load_and_check(path)) == {"a": "ü", "b": {"c": "ü"}}


def test_aliases_of_one_anchor_are_changed_apart(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: &x {lr: 1}\nb: *x\n")
    assert dict(load_and_check(path, ["b.lr=2"])) == {"a": {"lr": 1}, "b": {"lr": 2}}


def test_references_in_any_order_and_of_any_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("SIZE", "3")
    path = tmp_path / "c.yaml"
    path.write_text(
        "z: ${y}\ny: ${x}/y\nx: ${s.name}\ns: {name: n, same: '${.name}', other: '${..z}'}\nall: ${s}\n"
        "size: ${oc.decode:${oc.env:SIZE}}\npick: ${s.${which}}\nwhich: other\nname: ${oc.select:nothing,else}\n"
        "names: ${oc.dict.keys:s}\nrow: [a, '${row2.0}']\nrow2: [b, c]\nitem: ${row2[1]}\nplain: \\${x}\n"
    )
    found = load_and_check(path)
    assert found.z == found.all.other == found.pick == "n/y"
    assert (found.size, found.name, found.item, found.row[1]) == (3, "else", "c", "b")
    assert list(found.names) == ["name", "same", "other"]
    assert found.plain == "${x}"


@pytest.mark.parametrize("write", [lambda path: path.write_bytes(b"a: \xff\n"), lambda path: path.mkdir()])
def test_what_is_no_text_file(tmp_path, write):
    write(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 3\)|there is no such file"):
        load_and_check(tmp_path / "c.yaml")
