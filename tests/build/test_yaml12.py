"""Promises of the YAML reader: what a plain word means, and one line for everything that is not YAML."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from aotpack.yaml12 import Mark, Node, dotted, plain, read_document, read_value
from aotpack_runtime.errors import ManifestError


def problems(data: bytes) -> list[str]:
    """What is wrong with `data`, as lines, whether or not the reading went on."""
    try:
        return [str(problem) for problem in read_document(data, "m.yaml").problems]
    except ManifestError as error:
        return [str(problem) for problem in error.problems]


def the_problem(data: bytes) -> str:
    """The only thing wrong with `data`."""
    [line] = problems(data)
    return line


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1e-4", 0.0001),
        ("1.0e-3", 0.001),
        ("-1.5E+3", -1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("012", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("-7", -7),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("12:30:00", "12:30:00"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("1.2.3", "1.2.3"),
        ("==2.13.*", "==2.13.*"),
        ("2*n", "2*n"),
        ("=", "="),
        ("'12'", "12"),
        ('"true"', "true"),
        ("! 12", "12"),
        ("!!str 12", "12"),
        ("|-\n  12", "12"),
    ],
)
def test_a_word_means_what_yaml_1_2_says(text: str, value: object) -> None:
    [(_, read)] = plain(read_document(f"a: {text}\n".encode(), "m.yaml").root).items()
    assert read == value
    assert type(read) is type(value)


def test_not_a_number_is_read() -> None:
    assert math.isnan(plain(read_document(b"a: .nan", "m.yaml").root)["a"])


@pytest.mark.parametrize(
    ("data", "line"),
    [
        pytest.param(b"", "m.yaml:1:1: error: the file is empty", id="empty"),
        pytest.param(b" \n\n", "m.yaml:1:1: error: the file is empty", id="blank"),
        pytest.param(b"# a\n# b\n", "m.yaml:1:1: error: there is nothing but comments", id="only-comments"),
        pytest.param(b"a: 1\n---\nb: 2\n", "m.yaml:2:1: error: a second document starts here", id="two-documents"),
        pytest.param(b"- 1\n- 2\n", "m.yaml:1:1: error: the top level is a list", id="list"),
        pytest.param(b"hello\n", "m.yaml:1:1: error: the top level is the text", id="text"),
        pytest.param(b"---\n", "m.yaml:2:1: error: the top level is null", id="null"),
        pytest.param(b"a: 1\nb: caf\xe9\n", "m.yaml:2:7: error: byte 0xe9 is not UTF-8", id="latin-1"),
        pytest.param(b"\xef\xbb\xbfb: \xe9\n", "m.yaml:1:4: error: byte 0xe9 is not UTF-8", id="latin-1-after-bom"),
        pytest.param("a: 1".encode("utf-16"), "m.yaml:1:1: error: byte 0xff is not UTF-8", id="utf-16"),
        pytest.param(b"a: 1\nb: x\0y\n", "m.yaml:2:5: error: character U+0000 (a NUL byte)", id="nul"),
        pytest.param(b"a: \x07\n", "m.yaml:1:4: error: character U+0007 is not allowed", id="control"),
        pytest.param(b"a:\n\tb: 1\n", "m.yaml:2:1: error: while scanning", id="tab"),
        pytest.param(b"a:\n  b: 1\n\tc: 1\n", "m.yaml:3:1: error: while scanning", id="tab-later"),
        pytest.param(b"a: [1, 2\n", "m.yaml:2:1: error: while parsing a flow sequence", id="open-bracket"),
        pytest.param(b"a: 'x\n", "m.yaml:2:1: error: while scanning a quoted scalar", id="open-quote"),
        pytest.param(b"a: b: c\n", "m.yaml:1:5: error: mapping values are not allowed here; put", id="colon"),
        pytest.param(b"a: *{t}\n", "m.yaml:1:5: error: while scanning an alias", id="star"),
        pytest.param(b"%YAML 2.0\n---\na: 1\n", "m.yaml:1:1: error: found incompatible YAML", id="yaml-2"),
        pytest.param(b"a: !e!x 1\n", "m.yaml:1:4: error: while parsing a node, found undefined tag", id="tag-handle"),
    ],
)
def test_what_is_not_one_yaml_mapping_is_one_line(data: bytes, line: str) -> None:
    assert the_problem(data).startswith(line)
    with pytest.raises(ManifestError):
        read_document(data, "m.yaml")


def test_a_tab_is_called_a_tab() -> None:
    assert the_problem(b"a:\n\tb: 1\n").endswith("that is a tab: indent with spaces")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        pytest.param(
            b"a: 1\nb: 2\na: 3\n",
            "m.yaml:3:1: error: duplicate key 'a' on line 3, first on line 1; remove one",
            id="duplicate",
        ),
        pytest.param(
            b"v:\n  - {n: 1,\n     n: 2}\n",
            "m.yaml:3:6: error: v[0]: duplicate key 'n' on line 3, first on line 2; remove one",
            id="duplicate-inside",
        ),
        pytest.param(
            b"a: {near: &near 1}\nb: *nea\n",
            "m.yaml:2:4: error: b: alias *nea has no anchor &nea above it; did you mean 'near'?",
            id="alias",
        ),
        pytest.param(
            b"a: &x [1, *x]\n",
            "m.yaml:1:11: error: a[1]: alias *x stands inside the value it names",
            id="alias-of-itself",
        ),
        pytest.param(
            b"a: !!python/object/apply:os.system ['x']\n",
            "m.yaml:1:4: error: a: tag !!python/object/apply:os.system is not allowed; write a plain value",
            id="python-tag",
        ),
        pytest.param(b"a: !foo 3\n", "m.yaml:1:4: error: a: tag !foo is not allowed; write a plain value", id="tag"),
        pytest.param(
            b"a: 99999999999999999999\n",
            "m.yaml:1:4: error: a: the number 99999999999999999999 does not fit 64 bits; "
            "if it is text, put it in quotes",
            id="huge-int",
        ),
        pytest.param(
            b"a: 1e999\n",
            "m.yaml:1:4: error: a: the number 1e999 is too large",
            id="huge-float",
        ),
        pytest.param(
            b"a: 1\ntrue: 2\n",
            'm.yaml:2:1: error: a key is true (a boolean), expected text; if it is a name, put it in quotes: "true"',
            id="boolean-key",
        ),
        pytest.param(b"a: {[x]: 2}\n", "m.yaml:1:5: error: a: a key is a list, expected text", id="list-key"),
        pytest.param(
            b"a: {<<: 3}\n",
            "m.yaml:1:9: error: a: << is the number 3, expected a mapping or a list of mappings",
            id="merge-of-a-number",
        ),
    ],
)
def test_a_mistake_that_can_be_stepped_over_is_a_problem_of_the_document(data: bytes, line: str) -> None:
    [problem] = read_document(data, "m.yaml").problems
    assert str(problem) == line


def test_mistakes_are_collected() -> None:
    lines = problems(b"a: 1\na: *x\nb: !t 99999999999999999999\nc: 99999999999999999999\n")
    assert [line.split(" error")[0] for line in lines] == ["m.yaml:2:4:", "m.yaml:2:1:", "m.yaml:3:4:", "m.yaml:4:4:"]


def test_a_number_of_any_length_is_one_line() -> None:
    assert "does not fit 64 bits" in the_problem(b"a: " + b"9" * 100_000)


def test_merge_keys_fill_in_and_are_no_duplicates() -> None:
    data = b"""
base: &base {x: 1, y: 2}
more: &more {y: 3, z: 4}
one: {<<: *base, x: 9}
two: {x: 9, <<: *base}
both: {<<: [*base, *more]}
twice: {<<: *more, <<: *base}
quoted: {"<<": 5}
"""
    document = read_document(data, "m.yaml")
    tree = plain(document.root)
    assert document.problems == ()
    assert tree["one"] == tree["two"] == {"x": 9, "y": 2}
    assert tree["both"] == {"x": 1, "y": 2, "z": 4}
    assert tree["twice"] == {"x": 1, "y": 3, "z": 4}
    assert tree["quoted"] == {"<<": 5}


def test_an_anchor_may_be_given_again() -> None:
    assert plain(read_document(b"a: &x 1\nb: &x 2\nc: *x\n", "m.yaml").root) == {"a": 1, "b": 2, "c": 2}


def test_plain_values_are_not_shared_between_aliases() -> None:
    tree = plain(read_document(b"a: &x {v: [1]}\nb: *x\n", "m.yaml").root)
    assert tree["a"] == tree["b"]
    assert tree["a"] is not tree["b"]


def test_a_billion_laughs_are_one_line() -> None:
    names = "abcdefghij"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise(names)]
    assert "with its aliases expanded" in the_problem("\n".join(lines).encode())


@pytest.mark.parametrize("opening", [b"[", b"{a: ", b"- "], ids=["lists", "mappings", "block"])
def test_deep_nesting_is_one_line(opening: bytes) -> None:
    data = opening * 5000 if opening == b"- " else b"a: " + opening * 5000
    assert "nested more than 64 levels deep" in the_problem(data)


def test_deep_nesting_through_aliases_is_one_line() -> None:
    deep = "[" * 40 + "{}" + "]" * 40
    assert "nested more than" in the_problem(f"a: &a {deep.format(1)}\nb: {deep.format('*a')}\n".encode())


def test_every_value_and_key_knows_its_place() -> None:
    root = read_document(b"a: 1\nbb:\n  - x\n  - {c: 012}\n", "m.yaml").root
    assert isinstance(root.value, dict)
    assert root.mark == Mark("m.yaml", 1, 1)
    assert root.value["bb"].key == Mark("m.yaml", 2, 1)
    items = root.value["bb"].value
    assert isinstance(items, tuple)
    assert items[0] == Node("x", Mark("m.yaml", 3, 5), text="x")
    assert isinstance(items[1].value, dict)
    assert items[1].value["c"] == Node(12, Mark("m.yaml", 4, 9), key=Mark("m.yaml", 4, 6), text="012")


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    assert plain(read_document(b"\xef\xbb\xbfa: 1", "m.yaml").root) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "value"), [("4", 4), ("", None), ("[1, 2]", [1, 2]), ("{min: 1}", {"min": 1}), ("no", "no")]
)
def test_a_value_on_its_own_is_read_where_it_stands(text: str, value: object) -> None:
    root = read_value(text, Mark("--set", 3, 7)).root
    assert plain(root) == value
    assert root.mark == Mark("--set", 3, 7)


def test_paths_are_spelt_as_in_python() -> None:
    assert dotted(("entries", "e", "points", 0, "dims")) == "entries.e.points[0].dims"
    assert dotted(()) == ""
