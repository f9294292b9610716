"""What is written is read back, whatever it is; and the quick ways of dispatch agree with the plain ones."""

from __future__ import annotations

import ast
import json
import math
import re
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotpack_runtime.dispatch import Dispatcher, Hit
from aotpack_runtime.errors import MalformedBundle
from aotpack_runtime.format import index_json, sound
from aotpack_runtime.format.codec import (
    dump_guards,
    dump_outputs,
    dump_scalar,
    parse_guards,
    parse_outputs,
    parse_scalar,
)
from aotpack_runtime.format.expression import Expression, parse, variable
from aotpack_runtime.format.expression_source import SCOPE, source
from aotpack_runtime.format.fingerprint import canonical, changed, fingerprint
from aotpack_runtime.format.guard import Guards, IntGuard, Range, TensorGuard, ValueGuard, identity
from aotpack_runtime.format.index import (
    ArtifactRef,
    Default,
    Entry,
    File,
    Index,
    Parameter,
    Recipe,
    RecipeTarget,
    Source,
    Variant,
    WeightRef,
    WeightSet,
)
from aotpack_runtime.format.output import Argument, Outputs, Result, Size, Value, View
from aotpack_runtime.format.target import Target
from aotpack_runtime.format.tensor import Call, Other, TensorMeta, contiguous_strides
from aotpack_runtime.format.tree import LEAF, MAX_DEPTH, Tree, describe_difference, flatten, paths
from aotpack_runtime.format.tree import parse as parse_tree

Json = Any

# ------------------------------------------------------------------------------------------------- expressions

NAMES: Mapping[str, int] = {"n": 3, "x.shape[0]": 7, "q['a'][1].shape[2]": 0, "m.size": -4}
SPACE = {
    "n": 3, "x": SimpleNamespace(shape=[7]), "q": {"a": [None, SimpleNamespace(shape=[None, None, 0])]},
    "m": SimpleNamespace(size=-4), "min": min, "max": max, "ceil_div": lambda a, b: -(-a // b), "__builtins__": {},
}  # fmt: skip
"""The same values as objects for Python's own eval."""

numbers = st.sampled_from(list(NAMES)) | st.integers(0, 2**70).map(str) | st.integers(0, 9).map(str)


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(inner, inner)
    return st.one_of(
        st.tuples(pair, st.sampled_from(["+", "-", "*", "//", "%"])).map(lambda t: f"({t[0][0]} {t[1]} {t[0][1]})"),
        inner.map(lambda text: f"-{text}"),
        st.tuples(st.sampled_from(["min", "max"]), st.lists(inner, min_size=2, max_size=3)).map(
            lambda t: f"{t[0]}({', '.join(t[1])})"
        ),
        pair.map(lambda t: f"ceil_div({t[0]}, {t[1]})"),
    )


arithmetic = st.recursive(numbers, grown, max_leaves=12)
comparisons = st.tuples(
    arithmetic,
    st.lists(st.tuples(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), arithmetic), min_size=1, max_size=2),
).map(lambda t: f"({t[0]} {' '.join(f'{sign} {right}' for sign, right in t[1])})")
truths = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        inner.map(lambda text: f"(not {text})"),
        st.tuples(st.lists(inner, min_size=2, max_size=3), st.sampled_from([" and ", " or "])).map(
            lambda t: f"({t[1].join(t[0])})"
        ),
    ),
    max_leaves=6,
)
expressions = st.one_of(arithmetic, truths, truths.map(lambda text: f"{text} + 1"))


def outcome(function: Callable[[], object]) -> object:
    try:
        return int(function())  # type: ignore[call-overload]
    except ZeroDivisionError:
        return ZeroDivisionError


@given(expressions)
def test_an_expression_has_the_value_that_python_gives_it(text: str) -> None:
    found = parse(text)
    assert outcome(lambda: found(NAMES)) == outcome(lambda: eval(text, dict(SPACE)))  # noqa: S307 - made by us, above
    assert found.names <= NAMES.keys()


@given(expressions)
def test_the_source_of_an_expression_has_its_value(text: str) -> None:
    found = parse(text)
    local = {name: f"n{place}" for place, name in enumerate(NAMES)}
    values = {local[name]: value for name, value in NAMES.items()}
    written = source(found, local)
    assert outcome(lambda: eval(written, dict(SCOPE), values)) == outcome(lambda: found(NAMES))  # noqa: S307


@given(expressions)
def test_the_text_of_an_expression_reads_as_the_same_expression(text: str) -> None:
    once = parse(text)
    again = parse(once.text)
    assert again == once
    assert again.names == once.names
    assert outcome(lambda: again(NAMES)) == outcome(lambda: once(NAMES))


words = st.lists(
    st.sampled_from([*"nx0129()[]{}.,:=<>+-*/%~'\"\\ \n\x00\ud800λ", "and", "or", "not", "min(", "ceil_div(", "shape", "is",
                     "in", "lambda", "if", "else", "for", "**", "//", "==", ":=", "__class__", "f'{n}'", "...", "1e9", "1j", "None", "True"]),
    max_size=40,
).map("".join)  # fmt: skip


@given(st.one_of(st.text(max_size=60), words, expressions.flatmap(lambda text: words.map(lambda extra: text + extra))))
@settings(max_examples=400)
def test_text_is_an_expression_or_a_value_error(text: str) -> None:
    try:
        found = parse(text)
    except ValueError:
        return
    for env in (dict.fromkeys(found.names, 0), dict.fromkeys(found.names, 3)):
        assert isinstance(outcome(partial(found, env)), int | type)  # what is read can be computed


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("(" * 2000 + "1" + ")" * 2000, id="parentheses"),
        pytest.param("-" * 4000 + "1", id="signs"),
        pytest.param("+".join("1" * 2000), id="sums"),
        pytest.param("min(1, " * 500 + "2" + ")" * 500, id="calls"),
        pytest.param("x" + ".a" * 2000, id="attributes"),
        pytest.param("not " * 1000 + "1", id="nots"),
        pytest.param("0x" + "f" * 4000, id="digits"),
        pytest.param("1" * 5000, id="long"),
        pytest.param("ceil_div(1, 2, 3)", id="arity"),
        pytest.param("min(1)", id="arity-min"),
        pytest.param("min(*x, 2)", id="star"),
        pytest.param("2 ** 9 ** 9", id="power"),
        pytest.param("1 << 99999999", id="shift"),
    ],
)
def test_an_expression_that_would_not_end_well_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse(text)


# ------------------------------------------------------------------------------------------------------- scalars

scalars: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)


def through_json(value: Json) -> Json:
    return json.loads(canonical(value))


@given(scalars)
def test_a_scalar_keeps_type_and_value(value: Any) -> None:
    assert identity(parse_scalar(through_json(dump_scalar(value)))) == identity(value)


@given(scalars, scalars)
def test_scalars_are_identical_when_type_and_value_are(a: Any, b: Any) -> None:
    same_text = type(a) is type(b) and repr(a) == repr(b)
    assert (identity(a) == identity(b)) == same_text
    assert identity(a) == identity(a)


# --------------------------------------------------------------------------------------------------------- trees

Pair = namedtuple("Pair", ["first", "second"])  # noqa: PYI024 - the plain kind is what is tested


@dataclass
class Record:
    left: Any
    right: Any


keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=3) | st.integers(-2, 3) | st.none()


def containers(inner: st.SearchStrategy[Any], *, classes: bool) -> st.SearchStrategy[Any]:
    plain = [
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ]
    made = [st.tuples(inner, inner).map(lambda t: Pair(*t)), st.tuples(inner, inner).map(lambda t: Record(*t))]
    return st.one_of(*plain, *made) if classes else st.one_of(*plain)


values = st.recursive(st.integers(), lambda inner: containers(inner, classes=True), max_leaves=8)


def flattened(value: Any) -> tuple[Tree, list[Any]]:
    leaves: list[Any] = []
    return flatten(value, leaves), leaves


@given(values)
def test_a_tree_and_its_leaves_give_the_value_back(value: Any) -> None:
    pytest.importorskip("torch")
    from aotpack_runtime.loaders.inputs import unflatten

    tree, leaves = flattened(value)
    rest = list(leaves)
    found = unflatten(tree, rest)
    assert rest == []
    assert found == value
    assert flattened(found) == (tree, leaves)  # equal values may be of other types: Pair(1, 2) == (1, 2)


@given(values)
def test_a_tree_is_read_back_from_json(value: Any) -> None:
    tree, leaves = flattened(value)
    assert parse_tree(json.loads(json.dumps(tree))) == tree
    places = list(paths(tree, "q"))
    assert len(places) == len(leaves)
    assert len(set(places)) == len(places)
    assert hash(tree) == hash(flattened(value)[0])


@given(values)
def test_the_path_of_a_leaf_is_where_python_finds_it(value: Any) -> None:
    tree, leaves = flattened(value)
    assert [eval(path, {"q": value}) for path in paths(tree, "q")] == leaves  # noqa: S307 - a path of our own


@given(values, values)
def test_trees_differ_in_words_exactly_when_they_differ(a: Any, b: Any) -> None:
    left, right = flattened(a)[0], flattened(b)[0]
    found = describe_difference(left, right, "q")
    assert (found is None) == (left == right)
    assert found is None or found.startswith("q")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([LEAF, "tuple", "list", "dict", "class", "a"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@given(json_values)
def test_json_is_a_tree_or_a_value_error(value: Json) -> None:
    try:
        tree = parse_tree(value)
    except (ValueError, TypeError):
        return
    assert json.loads(json.dumps(tree)) == value
    list(paths(tree, "q"))


def test_a_value_that_holds_itself_is_a_value_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} deep"):
        flattened(value)


# --------------------------------------------------------------------------------------------------- fingerprints

parts = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-3, 3)
        | st.sampled_from([0.0, -0.0, 1.0, 1.5])
        | st.text("ab1", max_size=2),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=4,
)


@given(parts)
def test_a_fingerprint_does_not_depend_on_order(value: dict[str, Json]) -> None:
    turned = dict(reversed(value.items()))
    assert fingerprint(turned) == fingerprint(value)
    assert re.fullmatch("[0-9a-f]{64}", fingerprint(value))


@given(parts, parts)
def test_what_changed_says_why_a_fingerprint_did(old: dict[str, Json], new: dict[str, Json]) -> None:
    names = changed(old, new)
    assert (fingerprint(old) == fingerprint(new)) == (names == [])
    without = [{name: part for name, part in each.items() if name not in names} for each in (old, new)]
    assert fingerprint(without[0]) == fingerprint(without[1])


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"a": {"b": math.nan}}])
def test_what_json_cannot_say_has_no_fingerprint(value: Json) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        fingerprint({"part": value})


# -------------------------------------------------------------------------------------------- records of a bundle

DTYPES = ["float32", "int64", "bool", "complex64"]
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
plain_json = st.dictionaries(texts, texts | st.integers() | st.booleans(), max_size=2)
identifiers = st.from_regex(r"[a-z][a-z_0-9]{0,3}", fullmatch=True).filter(lambda name: name.isidentifier())
dims = st.integers(0, 40) | st.tuples(st.integers(0, 9), st.none() | st.integers(9, 99)).map(lambda t: Range(*t))
ranges = st.tuples(st.integers(-9, 9), st.none() | st.integers(9, 99)).map(lambda t: Range(*t))


@st.composite
def some_guards(draw: st.DrawFn, trees: tuple[Tree, ...] | None = None, names: tuple[str, ...] = ("x", "q")) -> Guards:
    made = trees or tuple(draw(some_trees(classes=True)) for _ in names)
    places = [place for tree, name in zip(made, names, strict=True) for place in paths(tree, name)]
    leaves = [draw(some_leaf(place)) for place in places]
    sizes = [name for guard in leaves for name in sizes_of(guard)]
    where = draw(st.lists(relations(sizes), max_size=2)) if sizes else []
    return Guards(made, tuple(leaves), tuple(where))


def some_trees(*, classes: bool) -> st.SearchStrategy[Tree]:
    shapes = st.recursive(st.just(0), lambda inner: containers(inner, classes=classes), max_leaves=3)
    return shapes.map(lambda value: flattened(value)[0])


@st.composite
def some_leaf(draw: st.DrawFn, place: str) -> Any:
    match draw(st.sampled_from(["tensor", "tensor", "value", "int"])):
        case "tensor":
            rank = draw(st.integers(0, 3))
            sizes = [variable(place, axis) for axis in range(rank)]
            exact = st.tuples(*[st.sampled_from([parse(text) for text in ("1", *sizes)]) for _ in range(rank)])
            layouts = st.just("contiguous") | (exact if rank else st.nothing())
            return TensorGuard(
                path=place, dtype=draw(st.sampled_from(DTYPES)), dims=tuple(draw(dims) for _ in range(rank)),
                device=draw(st.sampled_from(["cpu", "cuda"])), layout=draw(layouts), aligned=draw(st.booleans()),
                written=draw(st.booleans()),
            )  # fmt: skip
        case "value":
            return ValueGuard(path=place, value=draw(scalars))
    return IntGuard(path=place, dim=draw(ranges))


def sizes_of(guard: Any) -> list[str]:
    match guard:
        case TensorGuard():
            return [variable(guard.path, axis) for axis in range(len(guard.dims))]
        case IntGuard():
            return [variable(guard.path)]
    return []


def relations(sizes: list[str]) -> st.SearchStrategy[Expression]:
    one = st.sampled_from(sizes)
    return st.one_of(
        st.tuples(one, st.integers(2, 9)).map(lambda t: parse(f"{t[0]} % {t[1]} == 0")),
        st.tuples(one, one).map(lambda t: parse(f"{t[0]} == {t[1]}")),
        st.tuples(one, one).map(lambda t: parse(f"{t[0]} <= 2 * {t[1]} + 1")),
    )


@st.composite
def some_outputs(draw: st.DrawFn, guards: Guards) -> Outputs:
    tree = draw(some_trees(classes=False))
    sizes = [parse(name) for guard in guards.leaves for name in sizes_of(guard)] + [parse("4")]
    size = st.sampled_from(sizes) | st.sampled_from(sizes).map(lambda found: parse(f"2 * {found} + 1"))
    results = st.builds(
        Result, st.integers(0, 3), st.sampled_from(DTYPES), st.none() | st.lists(size, max_size=2).map(tuple)
    )
    known: list[st.SearchStrategy[Any]] = [results, st.builds(Value, scalars), st.builds(Size, size)]
    bases = results
    if guards.leaves:
        arguments = st.builds(Argument, st.integers(0, len(guards.leaves) - 1))
        known.append(arguments)
        bases = results | arguments
    known.append(
        st.integers(0, 2).flatmap(
            lambda rank: st.builds(
                View, bases, st.tuples(*[size] * rank), st.tuples(*[size] * rank), size, conj=st.booleans()
            )
        )
    )
    return Outputs(tree, tuple(draw(st.one_of(known)) for _ in paths(tree, "output")))


@given(some_guards())
def test_guards_are_read_back_as_written(guards: Guards) -> None:
    written = canonical(dump_guards(guards))
    found = parse_guards(json.loads(written))
    assert canonical(dump_guards(found)) == written
    assert exact_guards(found) == exact_guards(guards)


@given(some_guards().flatmap(some_outputs))
def test_outputs_are_read_back_as_written(outputs: Outputs) -> None:
    written = canonical(dump_outputs(outputs))
    found = parse_outputs(json.loads(written))
    assert canonical(dump_outputs(found)) == written
    assert [exact(leaf) for leaf in found.leaves] == [exact(leaf) for leaf in outputs.leaves]
    assert found.tree == outputs.tree


def exact(leaf: Any) -> Any:
    """The record with its scalar by type and value: 1 == True and NaN != NaN otherwise."""
    return (type(leaf), *identity(leaf.value)) if isinstance(leaf, Value | ValueGuard) else leaf


def exact_guards(guards: Guards) -> Any:
    return guards.trees, [(guard.path, exact(guard)) for guard in guards.leaves], guards.where


files = st.builds(File, digests, st.integers(0, 2**40))


@st.composite
def some_parameters(draw: st.DrawFn) -> tuple[Parameter, ...]:
    names = draw(st.lists(identifiers.filter(lambda name: not is_keyword(name)), max_size=3, unique=True))
    kinds = sorted(
        draw(st.lists(st.sampled_from(sound.PARAMETER_KINDS), min_size=len(names), max_size=len(names))),
        key=sound.PARAMETER_KINDS.index,
    )
    found: list[Parameter] = []
    for name, wanted in zip(names, kinds, strict=True):
        twice = wanted.startswith("var_") and wanted in [other.kind for other in found]
        kind = "keyword_only" if twice else wanted
        default = None
        after_default = any(other.default for other in found if other.kind.startswith("positional"))
        if not kind.startswith("var_") and (draw(st.booleans()) or (after_default and kind.startswith("positional"))):
            tree = draw(some_trees(classes=False))
            default = Default(tree, tuple(draw(scalars) for _ in paths(tree, name)))
        found.append(Parameter(name, kind, default))
    return tuple(sorted(found, key=lambda each: sound.PARAMETER_KINDS.index(each.kind)))


def is_keyword(name: str) -> bool:
    import keyword

    return keyword.iskeyword(name)


@st.composite
def some_variant(draw: st.DrawFn, name: str, parameters: tuple[Parameter, ...], kind: str) -> Variant:
    trees = tuple(
        ("tuple",) if each.kind == "var_positional" else ("dict", ()) if each.kind == "var_keyword"
        else draw(some_trees(classes=True)) for each in parameters
    )  # fmt: skip
    guards = draw(some_guards(trees=trees, names=tuple(each.name for each in parameters)))
    digest = draw(digests)
    file = File(digest, int(digest[:4], 16))  # what has one digest has one size
    example = tuple(
        (1,) * len(guard.dims) if isinstance(guard, TensorGuard) else 2 if isinstance(guard, IntGuard) else None
        for guard in guards.leaves
    )
    outputs = draw(some_outputs(guards))
    recipe = None
    if kind == "exported" and draw(st.booleans()):
        targets = [
            RecipeTarget(target=Target("cpu", draw(st.dictionaries(texts, texts, max_size=1))), job=draw(plain_json))
        ]
        recipe = Recipe(outputs=outputs, options=draw(plain_json), targets=tuple(targets * draw(st.integers(0, 2))))
    return Variant(
        id=name, point=draw(texts), tier=draw(st.sampled_from(["hot", "warm", "rare"])),
        target=Target("cpu", draw(st.dictionaries(texts, texts, max_size=2))),
        artifact=ArtifactRef(kind, digest, {"program.pt2" if kind == "exported" else "model.so": file}),
        guards=guards, outputs=outputs, weights="set", constants=(("c", "w"),), examples=(example,), recipe=recipe,
    )  # fmt: skip


@st.composite
def some_entry(draw: st.DrawFn, name: str) -> Entry:
    parameters = draw(some_parameters())
    return Entry(
        name=name, parameters=parameters,
        variants=tuple(draw(some_variant(f"{name}/{n}", parameters, "aoti")) for n in range(draw(st.integers(0, 2)))),
        programs=tuple(draw(some_variant(f"{name}/p{n}", parameters, "exported")) for n in range(draw(st.integers(0, 1)))),
        source=Source(draw(texts), draw(plain_json), draw(st.dictionaries(texts, texts, max_size=1))),
        fills=draw(plain_json), on_miss={"policy": "eager"}, verify=draw(plain_json), imports=tuple(draw(st.lists(texts, max_size=2))),
        operators=draw(st.dictionaries(texts, texts, max_size=2)), output_names=draw(st.none() | st.just(("a", "b"))),
        training=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def some_index(draw: st.DrawFn) -> Index:
    weights = {"w": WeightRef("w"), "v": WeightRef("w", (1, 0))}
    state = draw(st.sampled_from([(), ("w",)]))
    return Index(
        name=draw(texts), version=draw(texts), labels=draw(st.dictionaries(texts, texts, max_size=2)),
        requires=draw(st.dictionaries(texts, texts, max_size=2)),
        entries={name: draw(some_entry(name)) for name in draw(st.lists(identifiers, max_size=2, unique=True))},
        weights_file=draw(files), weight_sets={"set": WeightSet(weights, state, draw(texts))},
        provenance=draw(plain_json), settings=draw(plain_json),
    )  # fmt: skip


@given(some_index())
@settings(max_examples=60)
def test_an_index_is_read_back_as_written(made: Index) -> None:
    written = index_json.dump(made)
    found = index_json.parse(written)
    assert index_json.dump(found) == written
    assert found.members() == made.members()
    theirs = {variant.id: variant for variant in found.variants()}
    assert len(theirs) == len(made.variants())
    for variant in made.variants():
        assert exact_guards(theirs[variant.id].guards) == exact_guards(variant.guards)
        assert theirs[variant.id].examples == variant.examples
        assert theirs[variant.id].recipe == variant.recipe


@given(some_index(), st.data())
@settings(max_examples=60)
def test_an_index_with_one_value_changed_is_read_or_malformed(made: Index, data: st.DataObject) -> None:
    root = json.loads(index_json.dump(made))
    holder, key = data.draw(st.sampled_from(list(places_in(root))))
    holder[key] = data.draw(
        st.sampled_from([None, True, -1, 2**70, 1.5, "", "x", "x.shape[9]", [], [1], [[]], {}, {"a": 1}])
    )
    try:
        found = index_json.parse(json.dumps(root).encode())
    except MalformedBundle:
        return
    assert index_json.parse(index_json.dump(found)).members() == found.members()


def places_in(value: Json) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [
        place for key, item in items for place in ((value, key), *places_in(item)) if (value, key) != (value, "format")
    ]


# ------------------------------------------------------------------------------------------------------- dispatch

TREES: list[Tree] = [LEAF, ("tuple", LEAF), ("list", LEAF)]
FEW: list[Any] = [True, 1, 1.0, 0.0, -0.0, math.nan, None, "1"]
small_dims = st.sampled_from([0, 1, 2, Range(0, 1), Range(1, 2), Range(1, 3), Range(0, None), Range(2, None)])


@st.composite
def small_guard(draw: st.DrawFn, place: str) -> Any:
    kind = draw(st.sampled_from(["tensor", "tensor", "tensor", "value", "int"]))
    if kind == "value":
        return ValueGuard(path=place, value=draw(st.sampled_from(FEW)))
    if kind == "int":
        return IntGuard(path=place, dim=draw(st.sampled_from([Range(0, 1), Range(1, 2)])))
    return TensorGuard(
        path=place, dtype=draw(st.sampled_from(["float32", "int64"])), dims=tuple(cast("list[int | Range]", draw(st.lists(small_dims, max_size=2)))),
        device="cpu", aligned=draw(st.sampled_from([False, False, True])),
    )  # fmt: skip


@st.composite
def small_variants(draw: st.DrawFn) -> list[Variant]:
    found = []
    for number in range(draw(st.integers(0, 8))):
        leaves = (draw(small_guard("x")), draw(small_guard("y[0]")))
        sizes = [name for guard in leaves for name in sizes_of(guard)]
        where = tuple(draw(st.lists(relations(sizes), max_size=1))) if sizes else ()
        guards = Guards((LEAF, draw(st.sampled_from(TREES[1:]))), leaves, where)
        found.append(bare_variant(str(number), guards))
    return found


def bare_variant(name: str, guards: Guards) -> Variant:
    return Variant(
        id=name, point="", tier="hot", target=Target("cpu", {}), artifact=ArtifactRef("aoti", "0" * 64, {}), guards=guards,
        outputs=Outputs(("tuple",), ()), weights="", constants=(), examples=(),
    )  # fmt: skip


@st.composite
def small_leaf(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["tensor", "tensor", "tensor", "value", "other"]))
    if kind == "value":
        return draw(st.sampled_from([*FEW, 2, 3, 1j]))
    if kind == "other":
        return Other("an instance of a.B")
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    turned = draw(st.sampled_from([False, False, True]))
    return TensorMeta(
        dtype=draw(st.sampled_from(["float32", "int64"])), device="cpu", shape=shape,
        strides=contiguous_strides(shape)[:: -1 if turned else 1], offset=draw(st.sampled_from([0, 0, 4])),
        odd=draw(st.sampled_from(["", "", "", "has its conj bit set"])), needs_grad=draw(st.sampled_from([False, False, True])),
    )  # fmt: skip


@st.composite
def small_call(draw: st.DrawFn) -> Call:
    trees = (LEAF, draw(st.sampled_from(TREES[1:])))
    state = draw(st.sampled_from([(), (), (), ("autocast is on",)]))
    return Call(trees, (draw(small_leaf()), draw(small_leaf())), state)


def fitting(variant: Variant) -> st.SearchStrategy[Call]:
    """Calls near to what the variant asks for: most of them hit something."""

    @st.composite
    def near(draw: st.DrawFn) -> Call:
        leaves: list[Any] = []
        for guard in variant.guards.leaves:
            match guard:
                case TensorGuard():
                    bounds = [(dim, dim) if isinstance(dim, int) else (dim.low, dim.high or 4) for dim in guard.dims]
                    shape = tuple(draw(st.integers(low, high)) for low, high in bounds)
                    leaves.append(TensorMeta(guard.dtype, "cpu", shape, contiguous_strides(shape)))
                case IntGuard():
                    leaves.append(draw(st.integers(0, 2)))
                case ValueGuard():
                    leaves.append(guard.value)
        return Call(variant.guards.trees, tuple(leaves))

    return near()


@given(small_variants(), st.data())
@settings(max_examples=300)
def test_dispatch_takes_the_first_that_fits_and_static_before_ranged(
    variants: list[Variant], data: st.DataObject
) -> None:
    near = [fitting(variant) for variant in variants]
    call = data.draw(st.one_of(small_call(), *near))
    parameters = ("x", "y")
    in_order = sorted(variants, key=lambda variant: not variant.guards.static)  # sorting keeps the order of equals
    wanted = next((variant for variant in in_order if variant.guards.reject(call, parameters) is None), None)
    found = Dispatcher(parameters, variants).choose(call)
    if wanted is None:
        assert not isinstance(found, Hit)
        assert list(found.reasons) == [variant.id for variant in variants]
        assert "fits" not in found.reasons.values()
    else:
        assert isinstance(found, Hit)
        assert found.variant is wanted


@given(small_variants())
def test_a_variant_is_hit_by_its_own_examples_at_the_latest(variants: list[Variant]) -> None:
    """With sizes alone to judge, a call at the lowest sizes of a variant hits it or one before it."""
    for variant in variants:
        plain = replace(variant, guards=replace(variant.guards, where=()))
        leaves: list[Any] = []
        for guard in plain.guards.leaves:
            if isinstance(guard, TensorGuard):
                shape = tuple(dim if isinstance(dim, int) else dim.low for dim in guard.dims)
                leaves.append(TensorMeta(guard.dtype, "cpu", shape, contiguous_strides(shape)))
            else:
                assert isinstance(guard, IntGuard | ValueGuard)
                leaves.append(guard.dim.low if isinstance(guard, IntGuard) else guard.value)
        found = Dispatcher(("x", "y"), [plain]).choose(Call(plain.guards.trees, tuple(leaves)))
        assert isinstance(found, Hit), found


# ----------------------------------------------------------------------------------------------------- leaf keys


SHAPES = [(), (1,), (2,), (2, 2), (1, 2), (0, 2), (2, 1, 1, 2)]
DTYPE_NAMES = ["float32", "float32", "int64", "complex64", "bfloat16"]
LIVE_SCALARS = [*FEW, True, 1, 2, 0, 1j, 1 - 0.0j, complex(0, -0.0), complex(0, 0.0), "", "a", [1], object]


@dataclass(frozen=True)
class Live:
    """A leaf to make: a scalar, or a tensor by shape, dtype, offset in its memory and changes made to it."""

    scalar: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str
    offset: int
    changes: tuple[int, ...]

    def make(self) -> Any:
        import torch

        if self.scalar:
            return self.scalar[0]
        whole = torch.ones(64, dtype=getattr(torch, self.dtype))
        tensor: Any = whole[self.offset : self.offset + math.prod(self.shape)].view(self.shape)
        for change in self.changes:
            tensor = CHANGES[change](tensor)
        return tensor


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "scalar": st.just(()) | st.just(()) | st.sampled_from(LIVE_SCALARS).map(lambda value: (value,)),
    "shape": st.sampled_from(SHAPES),
    "dtype": st.sampled_from(DTYPE_NAMES),
    "offset": st.sampled_from([0, 0, 1, 2, 4]),
    "changes": st.lists(st.integers(0, 8), max_size=2).map(tuple),
}
lives = st.builds(Live, **FIELDS)


@st.composite
def two_lives(draw: st.DrawFn) -> tuple[Live, Live]:
    """A leaf, and one that is as it in all but at most one respect."""
    one, name = draw(lives), draw(st.sampled_from(list(FIELDS)))
    return one, replace(one, **{name: draw(FIELDS[name])})


def only(test: Callable[[Any], bool], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tensor: change(tensor) if type(tensor).__name__ != "Plain" and test(tensor) else tensor


def is_dense(tensor: Any) -> bool:
    import torch

    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad


@cache
def plain_class() -> Any:
    import torch

    return type("Plain", (torch.Tensor,), {})


def as_subclass(tensor: Any) -> Any:
    return tensor.as_subclass(plain_class())


def as_parameter(tensor: Any) -> Any:
    import torch

    return torch.nn.Parameter(tensor.detach(), requires_grad=False)


CHANGES: list[Callable[[Any], Any]] = [
    only(lambda t: is_dense(t) and t.dim() >= 2, lambda t: t.transpose(0, 1)),
    only(lambda t: is_dense(t) and t.is_complex(), lambda t: t.conj()),
    only(lambda t: is_dense(t) and t.is_floating_point(), lambda t: t._neg_view()),
    only(lambda t: is_dense(t) and t.is_floating_point(), lambda t: t.detach().requires_grad_()),
    only(lambda t: is_dense(t) and not t.is_conj() and not t.is_neg(), lambda t: t.to_sparse() if t.dim() else t),
    only(lambda t: is_dense(t) and str(t.dtype) == "torch.float32" and t.numel() and t.dim(), lambda t: t.to_mkldnn()),
    only(is_dense, lambda t: t.to("meta")),
    only(is_dense, as_parameter),
    only(lambda t: is_dense(t) and t.dim() > 0, as_subclass),
]


@given(two_lives(), st.sampled_from([(True, True), (False, False), (True, False)]))
@settings(max_examples=600)
def test_leaves_with_one_key_are_one_to_every_guard(pair: tuple[Live, Live], modes: tuple[bool, bool]) -> None:
    torch = pytest.importorskip("torch")
    from aotpack_runtime.arguments import compile_entry, describe

    parameter = (Parameter("x", "positional_or_keyword"),)
    seen: list[tuple[list[object], Call]] = []
    for live, mode in zip(pair, modes, strict=True):
        leaf = live.make()
        tree, leaves = flattened(leaf)
        with torch.set_grad_enabled(mode):
            made = [
                compile_entry(parameter, (kind,), aligned=True, written=True, memo={}, slow=lambda key, values: key)(
                    leaf
                )
                for kind in ("tensor", "scalar", "mixed")
            ]
            seen.append((made, describe((tree,), leaves, "cpu")))
    (left, one), (right, two) = seen
    for key, other in zip(left, right, strict=True):
        if key is not None and key == other:  # as a dict compares them
            assert exact_call(one) == exact_call(two)


def exact_call(call: Call) -> Any:
    leaves = [leaf if isinstance(leaf, TensorMeta | Other) else identity(leaf) for leaf in call.leaves]
    return call.trees, leaves, call.state


WAYS = ["apart", "same", "part", "beside"]


@given(
    st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS)),
    st.tuples(*[st.tuples(st.booleans(), st.booleans())] * 2),
    st.booleans(),
)
def test_calls_with_one_key_share_memory_alike(
    ways: tuple[str, str],
    modes: tuple[tuple[bool, bool], ...],
    nested: bool,  # noqa: FBT001
) -> None:
    """`modes`: were the tensors made in inference mode, and is it on now?"""
    torch = pytest.importorskip("torch")
    from aotpack_runtime.arguments import compile_entry, container_key, describe, flatten_all

    parameters = tuple(Parameter(name, "positional_or_keyword") for name in ("x", "y"))
    seen = []
    for way, (made_so, called_so) in zip(ways, modes, strict=True):
        with torch.inference_mode(made_so):
            memory = torch.ones(16)
            x = memory[:4]
            y = {"apart": torch.ones(4), "same": x, "part": memory[2:6], "beside": memory[4:8]}[way]
        with torch.inference_mode(called_so):
            trees, leaves = flatten_all(((x, y), None) if nested else (x, y))
            kinds = ("tensor", "tensor")
            made = compile_entry(parameters, kinds, aligned=True, written=True, memo={}, slow=lambda key, values: key)
            key: Any = container_key(trees, leaves, written=True) if nested else made(x, y)
            seen.append((key, exact_call(describe(trees, leaves, "cpu"))))
    (left, one), (right, two) = seen
    assert left is not None
    assert left != right or one == two


@given(lives)
def test_a_leaf_has_one_key_each_time_or_none(live: Live) -> None:
    pytest.importorskip("torch")
    from aotpack_runtime.arguments import leaf_key

    leaf = live.make()
    keys = []
    for _ in range(2):
        try:
            keys.append(leaf_key(leaf))
        except Exception:
            keys.append(None)
    assert keys[0] == keys[1]


def test_names_and_space_are_the_same_values() -> None:
    assert {name: eval(name, dict(SPACE)) for name in NAMES} == NAMES  # noqa: S307 - names of our own, above
    assert all(ast.unparse(ast.parse(name)) == name for name in NAMES)
