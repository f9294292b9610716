"""Records of kernels are read back as they were written, and a choice takes one of what fits, the same one each time."""

from __future__ import annotations

import itertools
import json
import math
import struct
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from aotpack_runtime.dispatch import Hit, KernelDispatcher
from aotpack_runtime.errors import MalformedBundle
from aotpack_runtime.format import index_json
from aotpack_runtime.format.choice import Choice, Rule, Timed, dump_choice, parse_choice
from aotpack_runtime.format.codec import dump_guards, parse_guards
from aotpack_runtime.format.expression import parse
from aotpack_runtime.format.fingerprint import canonical
from aotpack_runtime.format.guard import DescriptorGuard, Guards, IntGuard, NumberGuard, PointerGuard, Range, ValueGuard
from aotpack_runtime.format.index import ArtifactRef, Entry, File, Index, Kernel, Parameter, Source, Variant
from aotpack_runtime.format.launch import (
    CODE_BYTES,
    DESCRIPTOR_BYTES,
    ELEMENT_BYTES,
    Descriptor,
    Extent,
    Launch,
    Slot,
    check_launch,
    dump_launch,
    parse_launch,
)
from aotpack_runtime.format.output import Outputs, Value
from aotpack_runtime.format.target import Target
from aotpack_runtime.format.tensor import ITEMSIZE_BYTES, Call, TensorMeta
from aotpack_runtime.format.tree import LEAF

Json = Any
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)
INTS = list("bBhHiIqQ")
NAMES = ("x", "y", "n", "m", "a", "b")
TYPES = {"pointer": "Tensor", "descriptor": "Tensor", "int": "int", "value": "int", "float": "float", "bool": "bool"}


def expressions(names: list[str]) -> st.SearchStrategy[Any]:
    atoms = st.integers(1, 99).map(str) | (st.sampled_from(names) if names else st.nothing())
    grown = st.recursive(
        atoms,
        lambda inner: st.tuples(
            st.sampled_from(["({} + {})", "{} * {}", "ceil_div({}, {})", "min({}, {})", "({} // {})", "-{} % {}"]),
            inner,
            inner,
        ).map(lambda t: t[0].format(t[1], t[2])),
        max_leaves=4,
    )
    return grown.map(parse)


def conditions(names: list[str]) -> st.SearchStrategy[Any]:
    sides = st.tuples(expressions(names), st.sampled_from(["==", "<=", "<", "!=", ">"]), expressions(names))
    return sides.map(lambda t: parse(f"{t[0]} {t[1]} {t[2]}"))


@st.composite
def some_kinds(draw: st.DrawFn) -> dict[str, str]:
    """Parameter -> what its guards are of, the same in all variants of an entry."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
    return {
        name: draw(st.sampled_from(["pointer", "pointer", "descriptor", "int", "int", "float", "bool"]))
        for name in names
    }


@st.composite
def some_guards(draw: st.DrawFn, kinds: dict[str, str]) -> Guards:
    leaves: list[Any] = []
    for name, kind in kinds.items():
        dtype = draw(st.sampled_from(sorted(ITEMSIZE_BYTES)))
        match kind:
            case "pointer":
                leaves.append(
                    PointerGuard(
                        path=name,
                        dtype=draw(st.sampled_from([dtype, "any"])),
                        device="cuda",
                        aligned=draw(st.booleans()),
                    )
                )
            case "descriptor":
                leaves.append(DescriptorGuard(path=name, dtype=dtype, device="cuda", rank=draw(st.integers(1, 5))))
            case "int":
                bits = draw(st.sampled_from([7, 15, 31, 63, 70]))
                low = draw(st.integers(-(2**bits), 2**bits - 1) | st.just(0))
                high = draw(st.integers(low, 2**bits - 1) | st.none())
                leaves.append(
                    IntGuard(path=name, dim=Range(low, high))
                    if draw(st.booleans())
                    else ValueGuard(path=name, value=low)
                )
            case _:
                leaves.append(NumberGuard(path=name, kind=kind))
    ints = [guard.path for guard in leaves if isinstance(guard, IntGuard)]
    where = draw(st.lists(conditions(ints), max_size=2))
    return Guards((LEAF,) * len(leaves), tuple(leaves), tuple(where))


def fitting_codes(guard: Any) -> list[str]:
    """Letters of slots that hold all that a guard lets in."""
    match guard:
        case PointerGuard() | DescriptorGuard():
            return ["Q"]
        case IntGuard(dim=Range(low, high)):
            return [code for code in INTS if high is not None and holds(code, low) and holds(code, high)]
        case ValueGuard(value=value):
            return [code for code in INTS if holds(code, value)]
        case NumberGuard(kind="bool"):
            return ["?", "i"]
    return ["e", "f", "d"]


def with_slot(code: str, leaf: int) -> Launch:
    """A launch of one parameter."""
    one = parse("1")
    sizes = (one, one, one)
    return Launch(
        symbol="k", parameters=(Slot(0, code, leaf),), bytes=8, grid=sizes, block=sizes, shared=parse("0")
    )  # fmt: skip


def holds(code: str, value: Any) -> bool:
    try:
        struct.pack(f"<{code}", value)
    except struct.error:
        return False
    return True


def elements_of(guard: Any) -> list[int]:
    """The driver's numbers of elements as large as those of a descriptor's dtype."""
    return [number for number, size in enumerate(ELEMENT_BYTES) if size == ITEMSIZE_BYTES[guard.dtype]]


@st.composite
def some_launch(draw: st.DrawFn, guards: Guards) -> Launch:
    """Some of the leaves, each once, in any order; sizes and strides of what is described; hidden parameters."""
    made: list[tuple[str, int | None]] = []
    for place, guard in enumerate(guards.leaves):
        described = isinstance(guard, DescriptorGuard)
        passed = draw(st.sampled_from([True, True, True, False]))
        if passed and fitting_codes(guard):
            kinds = ["slot", "descriptor"] if described and elements_of(guard) else ["slot"]
            made.append((draw(st.sampled_from(kinds)), place))
        extents = draw(st.integers(0, 2)) if described else 0
        made += [("extent", place)] * extents
    hidden = draw(st.integers(0, 2))
    made += [("slot", None)] * hidden
    parameters: list[Any] = []
    end = 0
    for kind, leaf in draw(st.permutations(made)):
        offset = end + draw(st.integers(0, 9))
        of: Any = None if leaf is None else guards.leaves[leaf]
        codes = sorted(CODE_BYTES) if leaf is None else INTS if kind == "extent" else fitting_codes(of)
        code = draw(st.sampled_from(codes))
        if kind == "slot":
            parameters.append(Slot(offset, code, leaf))
        else:
            assert leaf is not None
            if kind == "extent":
                what, axis = draw(st.sampled_from(["sizes", "strides"])), draw(st.integers(0, of.rank - 1))
                parameters.append(Extent(offset, code, leaf, what, axis))
            else:
                block = tuple(draw(st.lists(st.integers(1, 256), min_size=of.rank, max_size=of.rank)))
                parameters.append(
                    Descriptor(offset, leaf, block, draw(st.integers(0, 3)), draw(st.sampled_from(elements_of(of))))
                )
        end = offset + (DESCRIPTOR_BYTES if kind == "descriptor" else CODE_BYTES[code])
    sizes = expressions([guard.path for guard in guards.leaves if isinstance(guard, IntGuard)])
    return Launch(
        symbol=draw(TEXTS), parameters=tuple(parameters), bytes=end + draw(st.integers(0, 9)), grid=draw(st.tuples(sizes, sizes, sizes)),
        block=draw(st.tuples(sizes, sizes, sizes)), shared=draw(sizes),
        cluster=draw(st.just((1, 1, 1)) | st.tuples(*[st.integers(1, 16)] * 3)), cooperative=draw(st.booleans()), overlap=draw(st.booleans()),
    )  # fmt: skip


axis_values = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
some_axes = st.dictionaries(st.sampled_from(["B", "dtype", "num_warps"]), axis_values, max_size=3)


def some_choices(ints: list[str]) -> st.SearchStrategy[Choice]:
    rules = st.lists(st.builds(Rule, st.none() | conditions(ints), some_axes), max_size=3).map(tuple)
    sizes: st.SearchStrategy[Any] = (
        st.dictionaries(st.sampled_from(ints), st.integers(-(2**63) + 1, 2**63 - 1), max_size=2)
        if ints
        else st.just({})
    )
    rows = st.lists(st.builds(Timed, sizes, some_axes, some_axes), max_size=3).map(tuple)
    tables = st.none() | st.dictionaries(
        st.sampled_from(["sm_80", "sm_86", "sm_90", "sm_100", "sm_103"]) | TEXTS, rows, max_size=3
    )
    return st.builds(Choice, rules, tables)


@st.composite
def some_variant(draw: st.DrawFn, name: str, kinds: dict[str, str]) -> Variant:
    guards = draw(some_guards(kinds))
    digest, kind = draw(DIGESTS), draw(st.sampled_from(["cubin", "ptx"]))
    needs = {"cubin": "sm_90a"} if kind == "cubin" else {"ptx": "compute_80 8.8"}
    return Variant(
        id=name, point="", tier="hot", target=Target("cuda", needs), guards=guards, weights="", constants=(), examples=(),
        artifact=ArtifactRef(kind, digest, {f"kernel.{kind}": File(digest, int(digest[:4], 16))}),
        outputs=Outputs(LEAF, (Value(None),)), axes=draw(some_axes), launch=draw(some_launch(guards)),
    )  # fmt: skip


@st.composite
def some_entry(draw: st.DrawFn, name: str) -> Entry:
    kinds = draw(some_kinds())
    ordinary = draw(st.integers(0, len(kinds)))
    variants = tuple(draw(some_variant(f"{name}/{number}", kinds)) for number in range(draw(st.integers(0, 3))))
    tensors = [each for each, kind in kinds.items() if TYPES[kind] == "Tensor"]
    return Entry(
        name=name, parameters=tuple(Parameter(each, "positional_or_keyword" if n < ordinary else "keyword_only") for n, each in enumerate(kinds)),
        variants=variants, programs=(), source=Source(draw(TEXTS), {}, {}), fills={}, on_miss={"policy": "jit"}, verify={},
        kernel=Kernel(
            text=File("0" * 64, 7), suffix=draw(st.sampled_from([".py", ".cu"])), types=tuple(TYPES[kind] for kind in kinds.values()),
            writes=tuple(draw(st.lists(st.sampled_from(tensors), unique=True))) if tensors else (),
            operator=draw(st.sampled_from(["", "ns::name", "_a1::b_2"])), choice=draw(some_choices([each for each, kind in kinds.items() if kind == "int"])),
        ),
    )  # fmt: skip


def bare_index(entries: tuple[Entry, ...]) -> Index:
    """An index of these entries and nothing else."""
    named = {entry.name: entry for entry in entries}
    return Index(
        name="k", version="1", labels={}, requires={}, entries=named, weights_file=None, weight_sets={}, provenance={}
    )


def through_json(value: Json) -> Json:
    return json.loads(canonical(value))


# --------------------------------------------------------------------------------------------------------- round trips


@given(some_kinds().flatmap(some_guards).flatmap(lambda guards: st.tuples(st.just(guards), some_launch(guards))))
@settings(max_examples=40)
def test_guards_and_launches_are_read_back_as_written(made: tuple[Guards, Launch]) -> None:
    guards, launch = made
    assert parse_guards(through_json(dump_guards(guards))) == guards
    found = parse_launch(through_json(dump_launch(launch)))
    assert found == launch
    assert canonical(dump_launch(found)) == canonical(dump_launch(launch))
    check_launch(found, guards.leaves)


@pytest.mark.parametrize("code", INTS)
@pytest.mark.parametrize("bits", [7, 8, 15, 16, 31, 32, 63, 64])
@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (-1, 0), (-1, -1)], ids=["top", "beyond", "both", "bottom"])
def test_an_int_slot_holds_both_ends_of_its_guard(code: str, bits: int, low: int, high: int) -> None:
    """Ranges that end where a slot of some width does, or one further."""
    ends = (low * 2**bits, high + 2**bits - 1 if high >= 0 else 0)
    launch = with_slot(code, 0)
    with nullcontext() if all(holds(code, end) for end in ends) else pytest.raises(ValueError, match="is passed"):
        check_launch(launch, [IntGuard(path="n", dim=Range(*ends))])


@pytest.mark.parametrize("code", INTS)
def test_no_int_slot_holds_a_range_without_an_end(code: str) -> None:
    launch = with_slot(code, 0)
    with pytest.raises(ValueError, match="is passed"):
        check_launch(launch, [IntGuard(path="n", dim=Range(0, None))])


@given(some_kinds().flatmap(some_guards), st.data())
@settings(max_examples=60)
def test_a_launch_is_refused_where_a_slot_does_not_hold_what_its_guard_lets_in(
    guards: Guards, data: st.DataObject
) -> None:
    assume(guards.leaves)
    leaf = data.draw(st.sampled_from(range(len(guards.leaves))))
    code = data.draw(st.sampled_from(sorted(CODE_BYTES)))
    launch = with_slot(code, leaf)
    if code in fitting_codes(guards.leaves[leaf]):
        check_launch(launch, guards.leaves)
    else:
        with pytest.raises(ValueError, match="is passed"):
            check_launch(launch, guards.leaves)


@given(some_kinds().flatmap(some_guards).flatmap(lambda guards: st.tuples(st.just(guards), some_launch(guards))))
@settings(max_examples=40)
def test_a_launch_is_refused_where_one_argument_is_two_parameters(made: tuple[Guards, Launch]) -> None:
    guards, launch = made
    slots = [each for each in launch.parameters if isinstance(each, Slot) and each.leaf is not None]
    assume(slots)
    again = replace(slots[0], offset=launch.bytes)
    twice = replace(launch, parameters=(*launch.parameters, again), bytes=launch.bytes + 8)
    with pytest.raises(ValueError, match="two parameters"):
        check_launch(twice, guards.leaves)


@given(some_choices(["n", "m"]))
@settings(max_examples=40)
def test_a_choice_is_read_back_as_written(choice: Choice) -> None:
    written = canonical(dump_choice(choice))
    found = parse_choice(json.loads(written))
    assert found == choice
    assert canonical(dump_choice(found)) == written
    assert found.names() == choice.names()
    kinds = [[type(value) for value in rule.pick.values()] for rule in choice.rules]
    assert [
        [type(rule.pick[name]) for name in given.pick] for rule, given in zip(found.rules, choice.rules, strict=True)
    ] == kinds


@given(
    st.lists(st.sampled_from(["rmsnorm", "matmul"]), unique=True).flatmap(
        lambda names: st.tuples(*map(some_entry, names))
    )
)
@settings(max_examples=15)
def test_an_index_of_kernels_is_read_back_as_written(entries: tuple[Entry, ...]) -> None:
    made = bare_index(entries)
    written = index_json.dump(made)
    found = index_json.parse(written)
    assert index_json.dump(found) == written
    assert found.members() == made.members()
    assert dict(found.entries) == dict(made.entries)


@given(some_kinds().flatmap(some_guards).flatmap(some_launch), st.data())
@settings(max_examples=40)
def test_a_launch_with_one_value_changed_is_read_or_a_value_error(launch: Launch, data: st.DataObject) -> None:
    record = through_json(dump_launch(launch))
    key = data.draw(st.sampled_from(sorted(record)))
    values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.sampled_from(["", "n", "Q", "n * 2", "sizes", "strides"]),
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.dictionaries(
                st.sampled_from(["descriptor", "offset", "block", "swizzle", "element"]), inner, max_size=5
            )
        ),
        max_leaves=8,
    )
    record[key] = data.draw(values)
    try:
        found = parse_launch(record)
    except (ValueError, TypeError, KeyError, AttributeError):  # what index_json.parse gives a place to
        return
    assert parse_launch(through_json(dump_launch(found))) == found


VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, -1, 0, 1, 2, 4, 8, 2**31, 2**70, 0.5, "", "x", "n", "Q", "i", "Tensor", "int", "ptx", "aoti", "sm_90", "n * n", "n // 0",
     "a\n'\"", [], [1], [[]], [0, "Q", 0], {}, {"a": 1}, {"descriptor": 0, "offset": 0, "block": [1], "swizzle": 0, "element": 0}]
)  # fmt: skip


def places(value: Json) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((value, key), *places(item))]


@given(st.tuples(some_entry("k"), some_entry("j")), st.data())
@settings(max_examples=20)
def test_an_index_of_kernels_with_values_changed_is_read_or_malformed(
    entries: tuple[Entry, ...], data: st.DataObject
) -> None:
    root = json.loads(index_json.dump(bare_index(entries)))
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from([*places(root["entries"]), (root, "shared")]))
        if data.draw(st.booleans()) or key == "shared":
            holder[key] = data.draw(VALUES)
        elif isinstance(holder, list):
            holder.insert(key, data.draw(VALUES))
        else:
            del holder[key]
    try:
        found = index_json.parse(json.dumps(root).encode())
    except MalformedBundle as error:
        assert "\n" not in str(error)  # noqa: PT017 - or it is read
        return
    assert index_json.parse(index_json.dump(found)).members() == found.members()


def test_a_launch_that_no_reader_takes_has_its_place_in_the_index() -> None:
    with pytest.raises(MalformedBundle):
        index_json.parse(b'{"format": 2, "entries": {"k": {"variants": [{"launch": 5}]}}}')


# --------------------------------------------------------------------------------------------------------------- choice


def bare(number: int, axes: Any, guards: Guards) -> Variant:
    return Variant(
        id=str(number), point="", tier="hot", target=Target("cuda", {}), artifact=ArtifactRef("cubin", "0" * 64, {}), guards=guards,
        outputs=Outputs(LEAF, (Value(None),)), weights="", constants=(), examples=(), axes=axes,
    )  # fmt: skip


few_axes = st.dictionaries(st.sampled_from(["B", "W"]), st.sampled_from([1, 2, 4, True, 1.0, "1"]), max_size=2)
env_values = st.one_of(st.integers(-5, 70), st.sampled_from([0, 2**31, 2**63, -(2**63), 2**64 - 1]))
few_conditions = st.sampled_from([None, "n > 4", "n % 2 == 0", "n == m", "n * m < 64", "m < 0 or n < 0"]).map(
    lambda text: text and parse(text)
)
few_rows = st.lists(
    st.builds(
        Timed, st.dictionaries(st.sampled_from(["n", "m"]), st.integers(-3, 2**40), max_size=2), few_axes, few_axes
    ),
    max_size=4,
).map(tuple)
few_choices = st.builds(
    Choice, st.lists(st.builds(Rule, few_conditions, few_axes), max_size=4).map(tuple),
    st.none() | st.dictionaries(st.sampled_from(["sm_80", "sm_86", "sm_90", "sm_100"]), few_rows, max_size=3),
)  # fmt: skip
capabilities = st.none() | st.sampled_from([(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
ALWAYS = Guards(
    (LEAF, LEAF), (IntGuard(path="n", dim=Range(-(2**63), 2**64)), IntGuard(path="m", dim=Range(-(2**63), 2**64)))
)


@given(few_choices, st.lists(few_axes, min_size=1, max_size=6), st.tuples(env_values, env_values), capabilities)
@settings(max_examples=100)
def test_a_choice_takes_one_of_what_fits_and_the_same_each_time(
    choice: Choice, axes: list[Any], numbers: tuple[int, int], capability: tuple[int, int] | None
) -> None:
    fits = [bare(number, each, ALWAYS) for number, each in enumerate(axes)]
    env = dict(zip("nm", numbers, strict=True))
    first = choice.pick(fits, env, capability)
    assert any(first is one for one in fits)
    assert choice.pick(list(fits), dict(env), capability) is first
    assert parse_choice(through_json(dump_choice(choice))).pick(fits, env, capability) is first


@given(few_choices, st.lists(few_axes, min_size=1, max_size=6), st.tuples(env_values, env_values), capabilities)
@settings(max_examples=100)
def test_a_choice_is_what_its_words_say(
    choice: Choice, axes: list[Any], numbers: tuple[int, int], capability: tuple[int, int] | None
) -> None:
    """The rows of this architecture (else of one of its major version) by distance, then the rules, then file order."""
    fits = [bare(number, each, ALWAYS) for number, each in enumerate(axes)]
    env = dict(zip("nm", numbers, strict=True))
    tables = choice.tables or {}
    own = f"sm_{capability[0]}{capability[1]}" if capability else ""
    kin = (
        own
        if own in tables
        else next((arch for arch in sorted(tables) if capability and arch[3:-1] == str(capability[0])), "")
    )

    def far(row: Timed) -> float:
        return sum(abs(math.log2(max(env[name], 1)) - math.log2(max(size, 1))) for name, size in row.sizes.items())

    rows = tables.get(kin, ())
    distances = sorted(map(far, rows))
    assume(all(b - a > 1e-6 or a == b for a, b in itertools.pairwise(distances)))
    picks: list[Any] = [
        {**row.given, **row.pick}
        for row in sorted(rows, key=far)
        if not any(row.given.get(k, v) != v for k, v in row.pick.items())
    ]
    picks += [rule.pick for rule in choice.rules if rule.when is None or rule.when(env)]
    wanted = next(
        (one for pick in picks for one in fits if all(one.axes.get(k) == v for k, v in pick.items())), fits[0]
    )
    assert choice.pick(fits, env, capability).id == wanted.id


@pytest.mark.parametrize(
    ("choice", "n", "m"),
    [
        pytest.param(Choice((Rule(parse("n % m == 0"), {"B": 2}),)), 4, 0, id="rule-that-divides-by-zero"),
        pytest.param(Choice((Rule(parse("ceil_div(n, m) > 1"), {"B": 2}),)), 4, 0, id="rule-with-ceil_div-by-zero"),
        pytest.param(Choice(tables={"sm_90": (Timed({"n": 10**400}, {}, {"B": 2}),)}), 4, 1, id="size-beyond-floats"),
        pytest.param(Choice(tables={"sm_90": (Timed({"n": 4}, {}, {"B": 2}),)}), 10**400, 1, id="argument-beyond-floats"),
    ],
)  # fmt: skip
def test_a_choice_is_total(choice: Choice, n: int, m: int) -> None:
    fits = [bare(number, {"B": number + 1}, ALWAYS) for number in range(2)]
    assert choice.pick(fits, {"n": n, "m": m}, (9, 0)) in fits


# ------------------------------------------------------------------------------------------------------------- dispatch

DTYPES = ("float32", "float16")


@st.composite
def few_guards(draw: st.DrawFn) -> Guards:
    x = PointerGuard(path="x", dtype=draw(st.sampled_from(DTYPES)), device="cuda", aligned=draw(st.booleans()))
    y = draw(
        st.builds(
            PointerGuard,
            path=st.just("y"),
            dtype=st.sampled_from(DTYPES),
            device=st.just("cuda"),
            aligned=st.booleans(),
        )
        | st.builds(
            DescriptorGuard,
            path=st.just("y"),
            dtype=st.sampled_from(DTYPES),
            device=st.just("cuda"),
            rank=st.just(2),
        )
    )
    n: Any = draw(
        st.sampled_from(
            [
                IntGuard(path="n", dim=Range(0, 9)),
                IntGuard(path="n", dim=Range(-5, None)),
                ValueGuard(path="n", value=1),
            ]
        )
    )
    where = draw(st.sampled_from([(), (parse("n % 2 == 0"),)])) if isinstance(n, IntGuard) else ()
    return Guards((LEAF,) * 3, (x, y, n), where)


few_arrays = st.builds(
    TensorMeta, st.sampled_from(["float32", "float16", "int8"]), st.sampled_from(["cuda:0", "cuda", "cpu"]), st.sampled_from([(8, 8), (4,), (8, 7)]),
    st.sampled_from([(8, 1), (1,), (1, 8)]), st.sampled_from([0, 0, 4]), st.sampled_from(["", "", "is masked"]),
).filter(lambda meta: len(meta.shape) == len(meta.strides))  # fmt: skip


@given(
    st.lists(few_guards(), max_size=6),
    few_arrays,
    few_arrays | st.none(),
    st.sampled_from([0, 1, 2, 9, 10, -5, -6, True, 1.0, None]),
)
@settings(max_examples=150)
def test_quick_dispatch_of_kernels_agrees_with_the_guards_one_by_one(
    guards: list[Guards], x: TensorMeta, y: Any, n: Any
) -> None:
    variants = [bare(number, {}, each) for number, each in enumerate(guards)]
    call = Call((LEAF,) * 3, (x, y, n))
    dispatcher = KernelDispatcher(("x", "y", "n"), variants, choice=Choice(), capability=(9, 0))
    wanted = next((one for one in variants if one.guards.reject(call, ("x", "y", "n")) is None), None)
    for _ in range(2):
        found = dispatcher.choose(call)
        if wanted is None:
            assert not isinstance(found, Hit)
            assert "fits" not in found.reasons.values()
        else:
            assert isinstance(found, Hit)
            assert found.variant is wanted


def test_a_pointer_to_anything_is_considered_beside_pointers_of_the_dtype() -> None:
    def guards(dtype: str, high: int | None) -> Guards:
        pointer = PointerGuard(path="x", dtype=dtype, device="cuda")
        return Guards((LEAF, LEAF), (pointer, IntGuard(path="n", dim=Range(0, high))))

    variants = [bare(0, {}, guards("float32", 9)), bare(1, {}, guards("any", None))]
    dispatcher = KernelDispatcher(("x", "n"), variants, choice=Choice(), capability=(9, 0))
    found = dispatcher.choose(Call((LEAF, LEAF), (TensorMeta("float32", "cuda:0", (8,), (1,)), 10)))
    assert isinstance(found, Hit), str(found)
