"""Kernel records that are broken, forged or meant to harm: refused at load in one line with a place, or harmless.

The text of an index becomes Python in two places (the function of a signature, the function of a launch): what is put
into every field here is code that would leave a mark if any of it were run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from aotpack_runtime import AotpackError, BundleError, MalformedBundle, Session, UnsupportedFormat
from aotpack_runtime.drivers import cuda
from aotpack_runtime.format.index_json import FORMAT_VERSION
from tests.support.bundles import index_record, members, write_bundle
from tests.support.fake_cuda import Array, FakeDriver, install
from tests.support.kernels import (
    descriptor,
    integer,
    kernel_entry,
    kernel_files,
    kernel_index,
    kernel_variant,
    literal,
    number,
    open_kernels,
    pointer,
)

Json = Any
P = 1 << 20
MARK = "mark_of_code_from_a_bundle"
CODE = f"__import__('os').mkdir({MARK!r})"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    monkeypatch.chdir(tmp_path)
    made = install(monkeypatch)
    made.look = lambda one: one.symbol
    monkeypatch.setattr(cuda, "encode_tensor_map", lambda *args, **kwargs: bytes(128))
    return made


def good() -> Json:
    """An entry with two variants, and one by descriptor."""
    leaves = [pointer("x"), integer("n"), number("a"), number("b", "bool"), literal("s", 1)]
    slots = [("Q", 0), ("i", 1), ("f", 2), ("?", 3)]
    more: dict[str, Any] = {"grid": ["ceil_div(n, 4)"], "where": ["0 <= ceil_div(n, 4) <= 9"]}
    first = kernel_variant(
        "v0", [pointer("x", aligned=True), *leaves[1:]], [*slots, ("Q", None)], axes={"B": 1}, **more
    )
    second = kernel_variant("v1", leaves, slots, axes={"B": 2}, shared="min(n, 8)", **more)
    choice = {
        "rules": [{"when": "n > 4", "pick": {"B": 2}}],
        "tables": {"sm_90": [{"sizes": {"n": 4}, "given": {}, "pick": {"B": 1}}]},
    }
    box = [{"descriptor": 0, "offset": 0, "block": [16, 32], "swizzle": 3, "element": 7}, [128, "q", 0, "strides", 0]]
    return kernel_index(
        k=kernel_entry([first, second], "Tensor int float bool int", writes=["x"], choice=choice),
        d=kernel_entry([kernel_variant("d0", [descriptor("x")], box)], "Tensor"),
    )


def opened(index: Json, folder: Path, driver: FakeDriver) -> Session:
    return open_kernels(write_bundle(folder, json.dumps(index).encode(), {**kernel_files(good()), **members()}), driver)


def used(session: Session) -> list[str]:
    """What came of using all of it: "None" or the name of an error of ours; no other error is caught."""
    found = []
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("k", (Array(P), 4, 1.0, True, 1)), ("k", (Array(P + 4), 8, 1e300, False, 1)), ("d", (Array(P, shape=(8, 64)),)),
    ]  # fmt: skip
    for name, args in [*calls, *calls]:
        try:
            found.append(str(session[name](*args)))
        except AotpackError as error:
            found.append(type(error).__name__)
    session.warmup("all")
    session.status()
    session.close()
    return found


def test_the_bundle_that_the_others_change_one_thing_of_is_a_good_one(driver: FakeDriver, tmp_path: Path) -> None:
    assert used(opened(good(), tmp_path / "b", driver)) == ["None"] * 6
    assert driver.seen == ["v0", "v1", "d0"] * 2


Change = Callable[[Json], object]


def variant(name: str, value: Json) -> Change:
    return lambda index: index["entries"]["k"]["variants"][0].__setitem__(name, value)


def launch(name: str, value: Json) -> Change:
    return lambda index: index["entries"]["k"]["variants"][0]["launch"].__setitem__(name, value)


def slot(place: int, *value: Json) -> Change:
    return lambda index: index["entries"]["k"]["variants"][0]["launch"]["parameters"].__setitem__(
        place, value[0] if len(value) == 1 else list(value)
    )


def box(**more: Json) -> Change:
    return lambda index: index["entries"]["d"]["variants"][0]["launch"]["parameters"][0].update(more)


def extent(*value: Json) -> Change:
    return lambda index: index["entries"]["d"]["variants"][0]["launch"]["parameters"].__setitem__(1, list(value))


def guard(place: int, value: Json) -> Change:
    return lambda index: index["entries"]["k"]["variants"][0]["guards"]["leaves"].__setitem__(place, value)


def kernel(name: str, value: Json) -> Change:
    return lambda index: index["entries"]["k"]["kernel"].__setitem__(name, value)


def rule(**value: Json) -> Change:
    return lambda index: index["entries"]["k"]["kernel"]["choice"]["rules"][0].update(value)


def row(**value: Json) -> Change:
    return lambda index: index["entries"]["k"]["kernel"]["choice"]["tables"]["sm_90"][0].update(value)


def renamed(name: str, new: str) -> Change:
    """The parameter called so everywhere that it is named."""

    def change(index: Json) -> None:
        entry = index["entries"]["k"]
        text = json.dumps(entry).replace(f'"{name}"', json.dumps(new))
        if name == "n":
            text = text.replace("ceil_div(n, 4)", "1").replace("min(n, 8)", "1").replace("n > 4", "1 > 0")
        index["entries"]["k"] = json.loads(text)

    return change


def dropped(*path: Any) -> Change:
    def change(index: Json) -> None:
        for step in path[:-1]:
            index = index[step]
        del index[path[-1]]

    return change


DEEP = "+".join(["n"] * 500)
REFUSED: dict[str, Change] = {
    # the parameter block
    "offset-negative": slot(0, -8, "Q", 0), "offset-text": slot(0, "0", "Q", 0), "offset-float": slot(0, 0.0, "Q", 0), "offset-none": slot(0, None, "Q", 0),
    "offset-beyond-the-block": slot(4, 64, "Q", None), "offset-huge": slot(4, 2**70, "Q", None), "slots-overlap": slot(1, 4, "i", 1),
    "slots-in-one-place": slot(1, 0, "Q", 0), "slots-out-of-order": slot(0, 32, "Q", 0), "code-unknown": slot(0, 0, "P", 0), "code-long": slot(0, 0, "999s", 0),
    "code-empty": slot(0, 0, "", 0), "code-list": slot(0, 0, ["Q"], 0), "code-python": slot(0, 0, CODE, 0), "leaf-beyond": slot(0, 0, "Q", 5), "leaf-negative": slot(0, 0, "Q", -1),
    "leaf-text": slot(0, 0, "Q", "0"), "leaf-python": slot(0, 0, "Q", CODE), "leaf-float": slot(0, 0, "Q", 0.0), "slot-short": slot(0, 0, "Q"), "slot-long": slot(0, 0, "Q", 0, 0),
    "slot-none": slot(0, None), "slot-text": slot(0, "Q"), "slot-number": slot(0, 5), "slot-mapping": slot(0, {"offset": 0}),
    "bytes-negative": launch("bytes", -1), "bytes-huge": launch("bytes", 2**40), "bytes-over-the-limit": launch("bytes", 32765), "bytes-bool": launch("bytes", True),
    "bytes-text": launch("bytes", "64"), "bytes-float": launch("bytes", 64.0), "bytes-small": launch("bytes", 31), "bytes-none": launch("bytes", None),
    "parameters-none": launch("parameters", None), "parameters-number": launch("parameters", 5), "parameters-text": launch("parameters", "Q"),
    # descriptors and extents
    "descriptor-leaf-beyond": box(descriptor=1), "descriptor-leaf-text": box(descriptor="x"), "descriptor-offset-negative": box(offset=-128), "descriptor-overlaps": box(offset=8),
    "block-text": box(block="32"), "block-number": box(block=5), "block-of-texts": box(block=["16", "32"]), "block-negative": box(block=[-1, 32]), "block-huge": box(block=[2**17, 32]),
    "block-bool": box(block=[True, 32]), "swizzle-huge": box(swizzle=17), "swizzle-text": box(swizzle=CODE), "swizzle-none": box(swizzle=None), "element-huge": box(element=33),
    "element-bool": box(element=True), "extent-axis-negative": extent(128, "q", 0, "strides", -1), "extent-axis-text": extent(128, "q", 0, "strides", "0"),
    "extent-what": extent(128, "q", 0, "__class__", 0), "extent-leaf": extent(128, "q", 7, "sizes", 0), "extent-code": extent(128, "z", 0, "sizes", 0), "extent-overlaps": extent(120, "q", 0, "sizes", 0),
    # how large a launch is
    "grid-of-two": launch("grid", ["1", "1"]), "grid-of-four": launch("grid", ["1"] * 4), "grid-none": launch("grid", None), "grid-number": launch("grid", 5), "grid-of-numbers": launch("grid", [1, 1, 1]),
    "grid-python": launch("grid", [CODE, "1", "1"]), "grid-power": launch("grid", ["9**9**9", "1", "1"]), "grid-shift": launch("grid", ["1 << 99999999", "1", "1"]),
    "grid-deep": launch("grid", [DEEP, "1", "1"]), "grid-long": launch("grid", ["n " * 3000, "1", "1"]), "grid-digits": launch("grid", ["9" * 5000, "1", "1"]), "grid-lambda": launch("grid", ["(lambda: 1)()", "1", "1"]),
    "grid-walrus": launch("grid", ["(m := n)", "1", "1"]), "grid-float": launch("grid", ["1.5", "1", "1"]), "grid-text": launch("grid", ["'1'", "1", "1"]), "grid-empty": launch("grid", ["", "1", "1"]),
    "grid-names-a-tensor": launch("grid", ["x", "1", "1"]), "grid-names-a-shape": launch("grid", ["x.shape[0]", "1", "1"]), "grid-names-a-float": launch("grid", ["a", "1", "1"]), "grid-names-a-bool": launch("grid", ["b", "1", "1"]),
    "grid-names-a-literal": launch("grid", ["s", "1", "1"]), "grid-names-nothing": launch("grid", ["q", "1", "1"]), "grid-names-a-builtin": launch("grid", ["__import__", "1", "1"]),
    "grid-newline": launch("grid", ["n\nimport os", "1", "1"]), "block-names-nothing": launch("block", ["q", "1", "1"]), "shared-number": launch("shared", 0), "shared-names-nothing": launch("shared", "q"), "shared-none": launch("shared", None),
    "cluster-bool": launch("cluster", [True, 1, 1]), "cluster-zero": launch("cluster", [0, 1, 1]), "cluster-negative": launch("cluster", [-1, 1, 1]), "cluster-huge": launch("cluster", [17, 1, 1]), "cluster-of-two": launch("cluster", [2, 1]),
    "cluster-of-four": launch("cluster", [1] * 4), "cluster-text": launch("cluster", "211"), "cluster-none": launch("cluster", None), "cluster-python": launch("cluster", [CODE, 1, 1]),
    "symbol-none": launch("symbol", None), "symbol-number": launch("symbol", 5), "symbol-list": launch("symbol", ["v0"]), "launch-none": variant("launch", None), "launch-list": variant("launch", []), "launch-text": variant("launch", CODE),
    # guards
    "relation-names-a-float": lambda index: index["entries"]["k"]["variants"][0]["guards"]["where"].append("a > 0"),
    "relation-python": lambda index: index["entries"]["k"]["variants"][0]["guards"]["where"].append(CODE),
    "guard-of-another": guard(1, integer("m")), "guard-missing": dropped("entries", "k", "variants", 0, "guards", "leaves", 4), "int-of-a-number": guard(1, {"path": "n", "int": 5}), "int-of-bools": guard(1, {"path": "n", "int": ["a", "b"]}),
    "number-of-complex": guard(2, {"path": "a", "number": "complex"}), "number-python": guard(2, {"path": "a", "number": CODE}), "pointer-number": guard(0, {"path": "x", "pointer": 5, "device": "cuda"}), "pointer-device": guard(0, {"path": "x", "pointer": "float32", "device": None}),
    "descriptor-of-text": guard(0, {"path": "x", "descriptor": "text", "device": "cuda", "rank": 2}), "descriptor-rank-0": guard(0, {"path": "x", "descriptor": "float32", "device": "cuda", "rank": 0}), "descriptor-rank-6": guard(0, {"path": "x", "descriptor": "float32", "device": "cuda", "rank": 6}),
    "descriptor-rank-bool": guard(0, {"path": "x", "descriptor": "float32", "device": "cuda", "rank": True}), "guard-of-nothing": guard(0, {"path": "x"}), "guard-none": guard(0, None),
    # the entry
    "types-few": kernel("types", ["Tensor"]), "types-many": kernel("types", ["Tensor", "int", "float", "bool", "int", "int"]), "types-unknown": kernel("types", ["Tensor", "SymInt", "float", "bool", "int"]), "types-python": kernel("types", ["Tensor", CODE, "float", "bool", "int"]),
    "types-number": kernel("types", 5), "types-none": kernel("types", None), "writes-an-int": kernel("writes", ["n"]), "writes-nothing": kernel("writes", ["q"]), "writes-number": kernel("writes", [0]), "writes-python": kernel("writes", [CODE]),
    "operator-no-namespace": kernel("operator", "add"), "operator-three": kernel("operator", "a::b::c"), "operator-overload": kernel("operator", "a::b.c"), "operator-python": kernel("operator", CODE), "operator-newline": kernel("operator", "a::b\n"), "operator-number": kernel("operator", 5),
    "operator-digit": kernel("operator", "1a::b"), "operator-space": kernel("operator", "a:: b"), "operator-none": kernel("operator", None), "suffix-python": kernel("suffix", "/../../x"), "suffix-none": kernel("suffix", None), "text-none": kernel("text", None),
    "text-of-text": kernel("text", {"sha256": "../../etc/passwd", "bytes": 1}), "kernel-none": lambda index: index["entries"]["k"].__setitem__("kernel", None), "kernel-empty": lambda index: index["entries"]["k"].__setitem__("kernel", {}),
    "a-program": lambda index: index["entries"]["k"]["programs"].append(index["entries"]["k"]["variants"].pop()), "a-model-with-launches": dropped("entries", "k", "kernel"), "a-kernel-without-launches": dropped("entries", "k", "variants", 0, "launch"),
    "one-id-twice": lambda index: index["entries"]["k"]["variants"][1].__setitem__("id", "v0"), "no-file": lambda index: index["entries"]["k"]["variants"][0]["artifact"].__setitem__("files", {}),
    "two-files": lambda index: index["entries"]["k"]["variants"][0]["artifact"]["files"].__setitem__("other", {"sha256": "0" * 64, "bytes": 0}), "file-outside": lambda index: index["entries"]["k"]["variants"][0]["artifact"].__setitem__("files", {"../x": {"sha256": "0" * 64, "bytes": 0}}),
    # names of parameters
    **{f"parameter-{name}": renamed("n", name) for name in ("class", "lambda", "None", "True", "__memo", "__slow", "__class__", "1n", "n m", "n,", "n=1", "", "n)", CODE, "*n", "n\n", "n:int", "x")},
    "parameter-number": lambda index: index["entries"]["k"]["parameters"][1].__setitem__("name", 5), "parameter-star": lambda index: index["entries"]["k"]["parameters"][1].__setitem__("kind", "var_positional"),
    "parameter-positional-only": lambda index: index["entries"]["k"]["parameters"][0].__setitem__("kind", "positional_only"), "parameter-kind": lambda index: index["entries"]["k"]["parameters"][0].__setitem__("kind", CODE),
    "parameter-only-before-ordinary": lambda index: index["entries"]["k"]["parameters"][0].__setitem__("kind", "keyword_only"),
    # choices
    "choice-none": kernel("choice", None), "choice-list": kernel("choice", []), "rule-without-pick": dropped("entries", "k", "kernel", "choice", "rules", 0, "pick"), "rule-names-a-float": rule(when="a > 1"), "rule-names-nothing": rule(when="q > 1"), "rule-python": rule(when=CODE),
    "rule-number": rule(when=5), "rule-none": rule(when=None), "rule-power": rule(when="n ** 9 ** 9"), "pick-list": rule(pick=[]), "pick-none": rule(pick=None), "pick-of-lists": rule(pick={"B": [1]}), "pick-of-mappings": rule(pick={"B": {"a": 1}}), "pick-of-none": rule(pick={"B": None}),
    "rules-number": lambda index: index["entries"]["k"]["kernel"]["choice"].__setitem__("rules", 5), "tables-list": lambda index: index["entries"]["k"]["kernel"]["choice"].__setitem__("tables", []), "table-number": lambda index: index["entries"]["k"]["kernel"]["choice"]["tables"].__setitem__("sm_90", 5),
    "row-without-sizes": dropped("entries", "k", "kernel", "choice", "tables", "sm_90", 0, "sizes"), "sizes-of-text": row(sizes={"n": "4"}), "sizes-of-floats": row(sizes={"n": 4.0}), "sizes-of-bools": row(sizes={"n": True}), "sizes-of-a-float": row(sizes={"a": 4}), "sizes-of-nothing": row(sizes={"q": 4}),
    "sizes-list": row(sizes=[4]), "given-of-lists": row(given={"B": []}), "axes-of-none": variant("axes", {"B": None}), "axes-of-lists": variant("axes", {"B": [1]}), "axes-list": variant("axes", []), "axes-none": variant("axes", None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_record_is_malformed_at_load_with_its_place(name: str, driver: FakeDriver, tmp_path: Path) -> None:
    index = good()
    REFUSED[name](index)
    with pytest.raises(MalformedBundle) as caught:
        opened(index, tmp_path / "b", driver)
    message = str(caught.value)
    assert message.startswith("index.json: ")
    assert "entries" in message
    assert "\n" not in message
    assert len(message) < 500
    assert (driver.loads, driver.seen) == ([], [])
    assert not os.path.exists(MARK)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("place", ["axes", "pick", "bytes"])
def test_what_is_no_json_is_malformed(constant: str, place: str, driver: FakeDriver, tmp_path: Path) -> None:
    index = good()
    {"axes": variant("axes", {"B": 0.125}), "pick": rule(pick={"B": 0.125}), "bytes": launch("bytes", 0.125)}[place](
        index
    )
    text = json.dumps(index).replace("0.125", constant)
    with pytest.raises(MalformedBundle, match="is not JSON"):
        open_kernels(write_bundle(tmp_path / "b", text.encode(), kernel_files(good())), driver)


def test_a_key_that_is_given_twice_is_malformed(driver: FakeDriver, tmp_path: Path) -> None:
    text = json.dumps(good()).replace('"symbol": "v0"', '"symbol": "v0", "symbol": "other"')
    with pytest.raises(MalformedBundle, match="key 'symbol' is given twice"):
        open_kernels(write_bundle(tmp_path / "b", text.encode(), kernel_files(good())), driver)


# -------------------------------------------------------------------------------------------- what no launch can use


def untyped(place: int, word: str) -> Change:
    return lambda index: index["entries"]["k"]["kernel"]["types"].__setitem__(place, word)


def no_leaves(index: Json) -> None:
    index["entries"]["d"]["variants"][0]["guards"] = {"trees": [["tuple"]], "leaves": [], "where": []}
    index["entries"]["d"]["variants"][0]["launch"] |= {"parameters": [], "bytes": 0}


def more_leaves(index: Json) -> None:
    guards = index["entries"]["d"]["variants"][0]["guards"]
    guards |= {"trees": [["tuple", "*", "*"]], "leaves": [descriptor("x[0]"), descriptor("x[1]")]}


def both_names(index: Json) -> None:
    renamed("a", "ﬁ")(index)
    renamed("b", "fi")(index)


UNUSABLE: dict[str, Change] = {
    "guards-shared-nowhere": variant("guards", 7), "launch-shared-nowhere": variant("launch", -1), "guards-shared-true": variant("guards", True),
    "launch-shared-python": lambda index: (index.update(shared=[CODE]), variant("launch", 0)(index))[1],
    "one-argument-twice": lambda index: index["entries"]["k"]["variants"][0]["launch"]["parameters"].__setitem__(4, [24, "Q", 0]),
    "need-of-shared-text": lambda index: index["entries"]["k"]["variants"][0]["target"].__setitem__("needs", {"shared": CODE}),
    "leaf-bool": slot(0, 0, "Q", True), "descriptor-leaf-bool": box(descriptor=False),
    "an-address-as-a-float": slot(0, 0, "d", 0), "half-of-an-address": slot(0, 0, "i", 0), "a-float-as-an-int": slot(2, 12, "i", 2), "an-int-as-a-float": slot(1, 8, "f", 1), "an-int-as-an-address-of-8-bits": slot(1, 8, "b", 1),
    "an-int-range-wider-than-its-slot": guard(1, integer("n", -(2**63), 2**63 - 1)), "an-int-range-of-bools": guard(1, {"path": "n", "int": [True, True]}),
    "descriptor-of-a-number": lambda index: index["entries"]["k"]["variants"][0]["launch"].update(parameters=[{"descriptor": 1, "offset": 0, "block": [16], "swizzle": 0, "element": 7}], bytes=128),
    "descriptor-of-a-pointer": lambda index: index["entries"]["k"]["variants"][0]["launch"].update(parameters=[{"descriptor": 0, "offset": 0, "block": [16], "swizzle": 0, "element": 7}], bytes=128),
    "extent-of-a-number": lambda index: index["entries"]["k"]["variants"][0]["launch"].update(parameters=[[0, "q", 1, "sizes", 0]], bytes=8),
    "extent-of-a-pointer": lambda index: index["entries"]["k"]["variants"][0]["launch"].update(parameters=[[0, "q", 0, "sizes", 0]], bytes=8),
    "extent-beyond-the-rank": extent(128, "q", 0, "strides", 2), "extent-huge": extent(128, "q", 0, "strides", 2**70), "extent-float": extent(128, "f", 0, "strides", 0),
    "box-of-another-rank": box(block=[32]), "box-of-rank-0": box(block=[]), "box-of-nothing": box(block=[0, 32]), "box-beyond-256": box(block=[512, 32]), "swizzle-unknown": box(swizzle=9), "element-unknown": box(element=31), "element-of-another-size": box(element=9),
    "types-int-for-a-float": untyped(2, "int"), "types-float-for-an-int": lambda index: (untyped(1, "float")(index), kernel("choice", {})(index)), "types-int-for-a-tensor": lambda index: (untyped(0, "int")(index), kernel("writes", [])(index)), "types-tensor-for-an-int": untyped(4, "Tensor"),
    "a-guard-of-shapes": guard(0, {"path": "x", "dtype": "float32", "dims": [4], "device": "cuda"}), "a-literal-float": guard(2, {"path": "a", "value": {"float": "0x1p+0"}}), "a-literal-text": guard(4, {"path": "s", "value": "1"}),
    "a-tensor-on-the-cpu": guard(0, {"path": "x", "pointer": "float32", "device": "cpu"}), "no-leaves": no_leaves, "two-leaves": more_leaves,
    "cubin-for-nothing": lambda index: index["entries"]["k"]["variants"][0]["target"].__setitem__("needs", {"cubin": "banana"}), "cubin-with-python": lambda index: index["entries"]["k"]["variants"][0]["target"].__setitem__("needs", {"cubin": CODE}),
    "ptx-without-version": lambda index: index["entries"]["k"]["variants"][0]["target"].__setitem__("needs", {"ptx": "compute_80"}), "ptx-of-version-x": lambda index: index["entries"]["k"]["variants"][0]["target"].__setitem__("needs", {"ptx": "compute_80 8.x"}),
    "cubin-of-5000-digits": lambda index: index["entries"]["k"]["variants"][0]["target"].__setitem__("needs", {"cubin": "sm_" + "9" * 5000}),
    "a-kernel-that-is-a-shared-library": lambda index: index["entries"]["k"]["variants"][0]["artifact"].__setitem__("kind", "aoti"),
    "symbol-of-half-a-letter": launch("symbol", "\ud800"), "cooperative-text": launch("cooperative", "no"), "overlap-number": launch("overlap", 5),
    "parameter-that-reads-as-ours": renamed("a", "_\uff3fmemo"), "parameter-that-reads-as-another": both_names,
    "size-of-400-digits": row(sizes={"n": 10**400}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_record_that_no_launch_can_use_is_malformed_at_load(name: str, driver: FakeDriver, tmp_path: Path) -> None:
    index = good()
    UNUSABLE[name](index)
    with pytest.raises(MalformedBundle, match="entries") as caught:
        opened(index, tmp_path / "b", driver)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert driver.loads == []
    assert not os.path.exists(MARK)


HARMLESS: dict[str, Change] = {
    "offset-bool": slot(0, False, "Q", 0), "symbol-with-an-end": launch("symbol", "v0\0other"), "symbol-empty": launch("symbol", ""),
    "symbol-python": launch("symbol", CODE), "symbol-quotes": launch("symbol", "'\"\\\n\"\"\"'''"), "symbol-long": launch("symbol", "v" * 100_000), "hidden-parameters-only": launch("parameters", [[0, "Q", None]]),
    "id-python": variant("id", f"'''\n{CODE}\n'''"), "point-python": variant("point", CODE), "axes-python": variant("axes", {CODE: CODE}), "axes-huge": variant("axes", {"B": 10**400}), "pick-huge": rule(pick={"B": 10**400}), "pick-of-nothing": rule(pick={}),
    "pick-unknown": rule(pick={"Q": 1}), "table-of-python": lambda index: index["entries"]["k"]["kernel"]["choice"].__setitem__("tables", {CODE: [], "": [], "sm_": [], "sm_9": []}), "table-empty": lambda index: index["entries"]["k"]["kernel"]["choice"]["tables"].__setitem__("sm_90", []),
    "sizes-empty": row(sizes={}), "sizes-zero": row(sizes={"n": 0}), "sizes-negative": row(sizes={"n": -(2**80)}), "row-python": row(given={CODE: CODE}), "rule-always-false": rule(when="1 == 0"), "writes-twice": kernel("writes", ["x", "x"]),
    "no-variants": lambda index: index["entries"]["k"].__setitem__("variants", []), "unknown-kind": lambda index: index["entries"]["k"]["variants"][0]["artifact"].__setitem__("kind", "wasm"), "unknown-need": lambda index: index["entries"]["k"]["variants"][0]["target"].__setitem__("needs", {CODE: CODE}),
    "dtype-python": guard(0, {"path": "x", "pointer": CODE, "device": "cuda"}), "no-range": guard(1, integer("n", 5, 4)), "guard-of-everything": lambda index: index["entries"]["k"]["variants"][0]["guards"].__setitem__("where", []),
    "parameter-like-ours": renamed("n", "launch"), "parameter-like-a-builtin": renamed("n", "print"), "parameter-soft-keyword": renamed("n", "match"), "parameter-underscore": renamed("n", "_"), "parameter-of-another-alphabet": renamed("n", "число"),
    "source-python": lambda index: index["entries"]["k"]["source"].__setitem__("text", CODE), "policy-python": lambda index: index["entries"]["k"]["on_miss"].__setitem__("policy", CODE), "default": lambda index: index["entries"]["k"]["parameters"][4].__setitem__("default", {"tree": "*", "leaves": [1]}),
    "block-large": launch("bytes", 32764), "misaligned": lambda index: index["entries"]["k"]["variants"][0]["launch"].update(parameters=[[1, "Q", 0], [11, "i", 1]], bytes=15),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_strange_record_serves_or_misses_and_runs_nothing(name: str, driver: FakeDriver, tmp_path: Path) -> None:
    index = good()
    HARMLESS[name](index)
    try:
        session = opened(index, tmp_path / "b", driver)
    except BundleError as error:
        assert "\n" not in str(error)  # noqa: PT017 - most of these load
    else:
        assert set(used(session)) <= {"None", "GuardMiss"}
    assert not os.path.exists(MARK)


def test_a_kernel_beside_a_model_may_not_lend_it_its_launch(driver: FakeDriver, tmp_path: Path) -> None:
    index = good()
    index["entries"] |= index_record()["entries"]
    index["weights"] = index_record()["weights"]
    used(opened(index, tmp_path / "good", driver))
    index["entries"]["encoder"]["variants"][0]["launch"] = good()["entries"]["k"]["variants"][0]["launch"]
    with pytest.raises(MalformedBundle, match=r"entries\.encoder"):
        opened(index, tmp_path / "bad", driver)


def test_a_kernel_in_an_index_of_a_newer_format_is_refused(driver: FakeDriver, tmp_path: Path) -> None:
    index = good() | {"format": FORMAT_VERSION + 1}
    with pytest.raises(UnsupportedFormat):
        opened(index, tmp_path / "new", driver)


@pytest.mark.parametrize(("operator", "name"), [("prim::zz", "n"), ("by_hand::zz", "число")])
def test_an_operator_that_torch_refuses_is_an_error_of_ours(
    operator: str, name: str, driver: FakeDriver, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    index = good()
    renamed("n", name)(index)
    kernel("operator", operator)(index)
    with pytest.raises(AotpackError, match="operator"):
        opened(index, tmp_path / "b", driver).register_operators()
