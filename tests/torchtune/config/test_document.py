# ruff: noqa: E501 (messages stand in one piece, as they are printed)
"""YAML with positions, interpolation, overrides."""

from pathlib import Path

import pytest

from torchtune.config import ConfigError, Document, apply_overrides, read_document
from torchtune.config._references import interpolate


def parsed(tmp_path: Path, text: str, *overrides: str) -> Document:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    document = read_document(path)
    document.name = "c.yaml"
    apply_overrides(document, overrides)
    interpolate(document, {})
    return document


def refusals(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parsed(tmp_path, text, *overrides).check()
    return [str(mistake).replace(f"{tmp_path}/", "") for mistake in caught.value.errors]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1e5", 1e5),
        ("1E+3", 1000.0),
        ("-3e-4", -3e-4),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", float("-inf")),
        ("7", 7),
        ("true", True),
        ("null", None),
        ("None", None),
        ("", None),
        ("2024-01-31", "2024-01-31"),
        ("[a, 1, 2e-5]", ["a", 1, 2e-5]),
        ("{a: 1}", {"a": 1}),
        ("'1e5'", "1e5"),
        ("a=b", "a=b"),
        ("train[:5%]", "train[:5%]"),
        ("What is: this? # nothing", "What is: this? # nothing"),
        ("'tis", "'tis"),
        ("@x", "@x"),
    ],
)
def test_values_of_the_command_line_have_yaml_types(text, value):
    document = Document({})
    apply_overrides(document, [f"setting={text}"])
    document.check()
    assert document.data["setting"] == value
    assert type(document.data["setting"]) is type(value)


def test_floats_have_no_point_and_dates_are_texts_in_files(tmp_path):
    data = parsed(tmp_path, "a: 2e-5\nb: [1e5, 1.5, 3]\nc: 2024-01-31\nd: 'None'\ne: 1.2.3\n").data
    assert data == {"a": 2e-5, "b": [1e5, 1.5, 3], "c": "2024-01-31", "d": "None", "e": "1.2.3"}


def test_integers_must_fit_64_bits(tmp_path):
    assert parsed(tmp_path, "a: 9223372036854775807\n").data == {"a": 2**63 - 1}
    for text in ("9223372036854775808", "-9223372036854775808"):
        (message,) = refusals(tmp_path, f"a: {text}\n")
        assert f"c.yaml:1: '{text}' is no int of at most 64 bits" in message


def test_every_key_has_its_line(tmp_path):
    document = parsed(tmp_path, "a: 1\nb:\n  c:\n  - x\n  - d: 2\n", "b.c.1.d=3")
    assert document.position(("b", "c", 0)).line == 4
    assert document.position(("b", "c", 1, "d")).text == "command line"
    assert document.position(("b", "c", 1, "nothing")).line == 5


def test_duplicate_keys_are_refused_at_any_depth(tmp_path):
    assert refusals(tmp_path, "a: 1\nb:\n  c: 1\n  c: 2\na: 3\n") == [
        "c.yaml:4: b.c: is given twice, first in line 3: remove one",
        "c.yaml:5: a: is given twice, first in line 1: remove one",
    ]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\n b: 2\n", 2, "mapping values are not allowed"),
        ("a: [1, 2\nb: 3\n", 2, "is not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "is not valid YAML"),
        ("a: !thing 3\n", 1, "could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", 2, "expected a single document"),
    ],
)
def test_syntax_errors_are_one_sentence_with_the_line(tmp_path, text, line, words):
    (message,) = refusals(tmp_path, text)
    assert message.startswith(f"c.yaml:{line}: ")
    assert words in message
    assert "\n" not in message


def test_files_that_hold_no_settings_are_refused(tmp_path):
    assert parsed(tmp_path, "# nothing\n").data == {}
    assert "must hold settings" in refusals(tmp_path, "- a\n- b\n")[0]
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_document(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_document(tmp_path / "none.yaml")


def test_anchors_and_merge_keys_are_expanded(tmp_path):
    data = parsed(tmp_path, "a: &x {lr: 1, wd: 2}\nb:\n  <<: *x\n  lr: 3\nc: *x\n").data
    assert data["b"] == {"lr": 3, "wd": 2}
    assert data["c"] == {"lr": 1, "wd": 2}
    assert "contains itself" in refusals(tmp_path, "a: &x [*x]\n")[0]


def test_interpolation_errors_are_named(tmp_path):
    messages = refusals(
        tmp_path, "output_dir: x\na: ${output_dri}/logs\nb: {c: '${a'}\nd: ${d}\ne: ${oc.env:NO_SUCH}\n"
    )
    assert (
        messages[0]
        == "c.yaml:2: a: '${output_dri}/logs' refers to 'output_dri', which does not exist; did you mean 'output_dir'?"
    )
    assert messages[1] == "c.yaml:3: b.c: '${a' is not a valid interpolation: write ${key} or ${section.key}"
    assert messages[2].startswith("c.yaml:4: d: '${d}' cannot be resolved")
    assert "NO_SUCH" in messages[3]


def test_interpolations_see_overrides(tmp_path):
    assert parsed(tmp_path, "a: 1\nb: ${a}\n", "a=5").data["b"] == 5
    assert parsed(tmp_path, "a: 1\n", "b=${a}", "c=run_${a}").data == {"a": 1, "b": 1, "c": "run_1"}


def test_overrides_set_add_and_remove_keys(tmp_path):
    text = "model: {_component_: a.b, n: 1}\nrows: [{x: 1}, {x: 2}]\nempty: null\none: {two: {three: 3}}\n"
    data = parsed(
        tmp_path,
        text,
        "model=c.d",
        "rows.1.x=5",
        "empty.new=1",
        "~one.two.three",
        "deep.er.key=v=w",
        "max_filename=0007",
    ).data
    assert data["model"] == {"_component_": "c.d", "n": 1}
    assert data["rows"] == [{"x": 1}, {"x": 5}]
    assert data["empty"] == {"new": 1}
    assert "one" not in data
    assert data["deep"] == {"er": {"key": "v=w"}}
    assert data["max_filename"] == "0007"
    assert parsed(tmp_path, text, "model={_component_: e.f}").data["model"] == {"_component_": "e.f"}
    assert parsed(tmp_path, text, "model=None", "~rows").data["model"] is None


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("--epochs", "command line: --epochs: is not an option of a recipe: settings are written key=value"),
        ("epohcs", "command line: epohcs: is not of the form key=value; did you mean 'epochs'?"),
        ("=3", "command line: =3: needs a key: write key=value or section.key=value"),
        ("~epoch", "command line: epoch: cannot be removed: it is not in the config; did you mean 'epochs'?"),
        (
            "~m._component_",
            "command line: m._component_: cannot be removed: a component without a name is nothing; remove the whole section",
        ),
        ("~epochs=1", "command line: epochs: a removal takes no value: write ~key"),
        ("epochs.x=1", "command line: epochs.x: epochs is 3 (int), not a section"),
        ("rows.2=1", "command line: rows.2: rows is a list of 2: write rows.0 for its first item"),
        ("rows.x=1", "command line: rows.x: rows is a list of 2: write rows.0 for its first item"),
        (
            "rows=[1, 2",
            "command line: rows: '[1, 2' is not a complete list or mapping: put quotation marks around text",
        ),
    ],
)
def test_overrides_that_cannot_be_applied_say_why(tmp_path, token, message):
    assert refusals(tmp_path, "epochs: 3\nrows: [1, 2]\nm: {_component_: a.b}\n", token) == [message]
