"""A server that never imports torch: what it may pass, what it gets, and what happens where this door ends.

Calls are made in fresh processes, so that torch is not there; `tests/property` compares their results with torch's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="bundles are built with torch")

from tests.property.zoo import property_models
from tests.support import custom_operator_cases
from tests.support.array_cases import array_cases
from tests.support.serving import in_process

START = """
import gc, json, sys, threading
import aotpack_runtime as apr
import numpy as np

def rows(count, width=16):
    return np.linspace(-1, 1, count * width, dtype=np.float32).reshape(count, width)

def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"
"""


@pytest.fixture(scope="module")
def models() -> Path:
    return property_models()


def serve(bundle: Path, code: str, *path: Path, start: str = START) -> Any:
    """What `code` prints as JSON, in a process that imported no torch before."""
    return json.loads(in_process(f"{start}\nbundle = {str(bundle)!r}\n{code}", *path).splitlines()[-1])


def test_a_hit_imports_neither_torch_nor_numpy(models: Path) -> None:
    code = """
import array, json, sys
import aotpack_runtime as apr

session = apr.load(bundle)
x = memoryview(array.array("f", range(16))).cast("B").cast("f", (1, 16))
y = session["mlp"](x)
print(json.dumps([y.tolist(), y.dtype, type(y).__name__, sorted({"torch", "numpy"} & set(sys.modules)), session.status()]))
"""
    values, dtype, kind, imported, status = serve(models, code, start="")
    assert (len(values[0]), dtype, kind, imported) == (4, "float32", "Array", [])
    assert abs(sum(values[0]) - 1) < 1e-5
    assert status["tensors"] == "array"
    assert status["hits"] == 1
    assert not any(entry["through_torch"] for entry in status["entries"].values())


@pytest.mark.parametrize(
    ("imported", "given", "expected"),
    [
        ("", "", "array"),
        ("import torch", "", "torch"),
        ("import torch", "tensors='array'", "array"),
        ("", "tensors='torch'", "torch"),
    ],
)
def test_a_session_is_for_arrays_where_torch_is_not_imported_or_where_it_is_said(
    models: Path, imported: str, given: str, expected: str
) -> None:
    assert serve(models, f"{imported}\nprint(json.dumps(apr.load(bundle, {given}).status()['tensors']))") == expected


# ---------------------------------------------------------------------------------------------------------- results


def test_a_result_is_of_the_callers_kind_and_lives_as_long_as_it_is_held(models: Path) -> None:
    code = """
class Shows:
    def __init__(self, array):
        self.kept, self.__array_interface__ = array, array.__array_interface__

session = apr.load(bundle)
entry = session["mlp"]
x = rows(1)
given = {"ndarray": x, "Array": apr.Array(x.tobytes(), "float32", (1, 16)), "memoryview": memoryview(x), "interface": Shows(x)}
results = {name: entry(one) for name, one in given.items()}
before = {name: np.asarray(one).tolist() for name, one in results.items()}
view = results["ndarray"][:, 1:3]
kinds = {name: type(one).__name__ for name, one in results.items()}
for _ in range(2000):
    entry(rows(1) * 2)
session.close()
del session, entry, given, x
gc.collect()
after = {name: np.asarray(one).tolist() for name, one in results.items()}
seen = view.tolist() == [before["ndarray"][0][1:3]]
print(json.dumps([kinds, before == after, len({str(one) for one in after.values()}), seen]))
"""
    kinds, same, different, view = serve(models, code)
    assert kinds == {"ndarray": "ndarray", "Array": "Array", "memoryview": "Array", "interface": "Array"}
    assert (same, different, view) == (True, 1, True)


def test_containers_numbers_views_and_arguments_come_back_as_eager_gives_them(models: Path) -> None:
    code = """
session = apr.load(bundle)
a = rows(4, 4)
result = session["nested"](q={"a": a, "more": [rows(4, 4), rows(4, 2)]}, pair=(rows(4, 4), 2))
inner = result["list"][1]
turned = result["turned"]
turned[0, 1] = 77
facts = [list(result), result["same"] is a, inner[1:], turned.strides == (4, 16), float(result["total"][1, 0])]
x, y = rows(3, 4), rows(3, 4)
written, total, view = session["writing"](x, y)
facts += [written is x, np.shares_memory(view, x), bool((x == rows(3, 4) + 1).all()), "torch" in sys.modules]
print(json.dumps(facts))
"""
    assert serve(models, code) == [
        ["total", "list", "same", "turned", "x"],
        True,
        [3, None, "s", 4, 1.5, True],
        True,
        77.0,
        True,
        True,
        True,
        False,
    ]


def test_half_precision_that_numpy_has_not_travels_as_our_own_array() -> None:
    code = """
half = apr.load(bundle)["half"]
bits = (np.linspace(-1, 1, 16, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(2, 8)
y, f16 = half(apr.Array(bits, "bfloat16", (2, 8)))
import torch
t = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
wanted = apr.load(bundle, tensors="torch")["half"](t)
same = [torch.equal(torch.from_dlpack(ours), theirs) for ours, theirs in zip((y, f16), wanted)]
print(json.dumps([y.dtype, f16.dtype, y.shape, same]))
"""
    assert serve(array_cases(), code) == ["bfloat16", "float16", [2, 8], [True, True]]


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        pytest.param("rows(2, 32)[:, ::2]", "returned", id="gaps"),
        pytest.param("rows(2)[:, ::-1]", "returned", id="backwards"),
        pytest.param("np.asfortranarray(rows(2))", "returned", id="column-major"),
        pytest.param("np.broadcast_to(rows(1), (3, 16))", "returned", id="broadcast"),
        pytest.param("rows(0)", "returned", id="no-rows"),
        pytest.param("rows(1).astype('>f4')", "CallError: mlp: x is not in this machine's byte order", id="big-endian"),
        pytest.param(
            "np.frombuffer(b'0' * 129, np.uint8)[1:].view(np.float32).reshape(2, 16)",
            "CallError: mlp: x lies",
            id="misaligned",
        ),
        pytest.param("np.ma.masked_array(rows(1), rows(1) > 0)", "CallError: mlp: x is masked", id="masked"),
        pytest.param(
            "np.zeros(2, [('a', 'i1'), ('x', 'f4', (16,))])['x']", "CallError: mlp: x has steps of", id="packed-record"
        ),
        pytest.param("rows(2).view(type('Sub', (np.ndarray,), {}))", "returned", id="subclass"),
        pytest.param("np.array([['a'] * 16])", "CallError: mlp: x has elements of", id="text"),
        pytest.param("np.float32(3)", "RuntimeError", id="numpy-scalar"),
        pytest.param("rows(2).tolist()", "GuardMiss", id="list"),
    ],
)
def test_an_odd_array_gives_eagers_result_or_a_clear_refusal(models: Path, made: str, outcome: str) -> None:
    code = f"""
entry = apr.load(bundle, source="never")["mlp"]
x = {made}
said = refused(entry, x)
if said == "returned":
    wanted = entry(np.ascontiguousarray(np.asarray(x), dtype=np.float32))
    assert np.allclose(entry(x), wanted), (entry(x), wanted)
print(json.dumps([said, "torch" in sys.modules]))
"""
    said, imported = serve(models, code)
    assert not (imported and said.startswith("CallError")), said  # torch would not take it either
    assert said.startswith(outcome) or (outcome == "RuntimeError" and said.startswith("GuardMiss")), said


def test_a_session_for_tensors_says_what_to_do_with_arrays(models: Path) -> None:
    code = """
import torch, traceback

class Only:
    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

def words(call, *args):
    try:
        call(*args)
    except Exception as error:
        return "".join(traceback.format_exception_only(error))

strict, eager = [apr.load(bundle, mode=mode, source=source) for mode, source in (("strict", "never"), ("eager", "auto"))]
given = [rows(2), apr.Array(rows(2), "float32", (2, 16)), Only(rows(2))]
said = [words(one["mlp"], x) for one in (strict, eager) for x in given]
quiet = [words(strict["mlp"], x) for x in (torch.zeros(2, 3), 5, np.float32(3), np.ndarray)]
nested = words(strict["nested"], {"a": torch.zeros(4, 4), "more": [rows(4, 4), torch.zeros(4, 2)]}, (torch.zeros(4, 4), 2))
mixed = words(apr.load(bundle, tensors="array", source="never")["writing"], torch.zeros(3, 4), rows(3, 4))
print(json.dumps([said, quiet, nested, mixed]))
"""
    said, quiet, nested, mixed = serve(models, code, models.parent)
    for words, name in zip(said, ["ndarray", "Array", "Only"] * 2, strict=True):
        assert f"x is an array ({name}) where tensors of torch are served: pass torch.from_numpy(x), or load" in words
        assert "tensors='array'" in words
    assert [words.partition(":")[0].rpartition(".")[2] for words in said] == ["GuardMiss"] * 3 + ["TypeError"] * 3
    assert not any("array (" in words for words in quiet), quiet
    assert "pass torch.from_numpy(q['more'][0])" in nested
    assert "pass torch.from_numpy(y)" in mixed


def test_an_int_beyond_64_bits_is_a_miss_that_names_it(models: Path) -> None:
    code = """
session = apr.load(bundle, mode="eager", source="never")
said = [refused(session["narrow"], rows(3, 1)[:, 0], n) for n in (3, 2**63, 10**400)]
import torch
other = apr.load(bundle, mode="eager", source="never", tensors="torch")
said += [refused(other["narrow"], torch.zeros(3), n) for n in (3, 2**63, 10**400)]

from aotpack_runtime.loaders.libtorch import int64s
said.append(refused(int64s, (1, 2**63)))
print(json.dumps(said))
"""
    said = serve(models, code)
    assert [said[0], said[3]] == ["returned", "returned"]
    for words, seen in zip([*said[1:3], *said[4:6]], [str(2**63), "an int of 1329 bits"] * 2, strict=True):
        assert words.startswith("GuardMiss: narrow: ")
        assert f"n: expected an int of 64 bits, got {seen}" in words
    assert said[6] == f"OverflowError: {2**63} is beyond 64 bits: [1, {2**63}]"


def test_a_read_only_array_is_read_and_never_written(models: Path) -> None:
    code = """
session = apr.load(bundle)
x = rows(3, 4)
x.flags.writeable = False
said = refused(session["writing"], x, rows(3, 4))
kept = bool((x == rows(3, 4)).all())
reads = rows(1)
reads.flags.writeable = False
class Only:  # shows nothing but DLPack, as it was told to
    def __init__(self, array, **how):
        self.array, self.how = array, how

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**{**how, **self.how})

copied, open_ = Only(rows(3, 4), copy=True), Only(rows(3, 4))
also = [refused(session["writing"], one, rows(3, 4)) for one in (Only(x), copied, open_)]
kept = kept and bool((x == rows(3, 4)).all() and (copied.array == rows(3, 4)).all())
same = bool((np.asarray(session["mlp"](Only(reads))) == session["mlp"](rows(1))).all())
print(json.dumps([
    said, kept, session["mlp"](reads).shape, str(session["writing"].explain(x, rows(3, 4))), also, same,
    bool((open_.array == rows(3, 4) + 1).all()),
]))
"""
    said, kept, shape, explained, also, same, written = serve(models, code)
    assert said.startswith("CallError: writing: x is read-only")
    assert (kept, shape, same) == (True, [1, 4], True)
    assert [one.startswith("CallError: writing: x is read-only") for one in also] == [
        True,
        True,
        False,
    ]
    assert (also[2], written) == ("returned", True)
    assert "x may not be written: it is a read-only array" in explained


def test_an_array_of_a_gpu_is_turned_down_also_where_its_like_is_remembered(models: Path) -> None:
    code = """
class OnGpu:
    __cuda_array_interface__ = {
        "version": 3, "typestr": "<f4", "shape": (2, 16), "strides": None, "data": (1 << 20, False), "stream": None,
    }

session = apr.load(bundle, mode="strict")
entry = session["mlp"]
own = apr.Array(rows(2), "float32", (2, 16))
for _ in range(3):
    entry(own)
elsewhere = apr.Array.over(1 << 20, "float32", (2, 16), (64, 4), None, device="cuda:0")  # no memory: it must not be read
OnOddStream = type("OnOddStream", (), {"__cuda_array_interface__": {**OnGpu.__cuda_array_interface__, "stream": "7"}})
print(json.dumps([refused(entry, one) for one in (elsewhere, OnGpu(), OnOddStream(), own)]))
"""
    own, interface, odd, host = serve(models, code)
    assert odd.startswith("GuardMiss") and "'7' is no handle of a CUDA stream" in odd
    assert own.startswith("GuardMiss") and "x.device: expected cpu, got cuda:0" in own
    assert interface.startswith("GuardMiss") and "x.device: expected cpu, got cuda:0" in interface
    assert host == "returned"


def test_a_child_of_a_server_that_forks_at_once_serves(models: Path) -> None:
    code = """
import os

session = apr.load(bundle)
read, write = os.pipe()
child = os.fork()  # libraries are being opened in a thread
x = rows(2)
found = session["mlp"](x).tolist()
if not child:
    os.write(write, json.dumps(found).encode())
    os._exit(0)
status = os.waitpid(child, 0)[1]
os.close(write)
print(json.dumps([status, json.loads(os.read(read, 1 << 16)) == found]))
"""
    assert serve(models, code) == [0, True]


def test_a_bad_index_raises_and_the_server_goes_on(models: Path) -> None:
    code = """
entry = apr.load(bundle)["embed"]
ids = np.array([[1, 2, 99]])
print(json.dumps([refused(entry, ids), entry(np.array([[1, 2, 3]])).shape, "torch" in sys.modules]))
"""
    said, shape, imported = serve(models, code)
    assert said.startswith("RuntimeError: embed/")
    assert (shape, imported) == ([1, 8], False)


# ----------------------------------------------------------------------------------------------------------- misses


def test_a_miss_imports_torch_and_says_so(models: Path) -> None:
    code = """
session = apr.load(bundle)
entry = session["mlp"]
before = "torch" in sys.modules
y = entry(rows(100))
status = session.status()["entries"]["mlp"]
print(json.dumps([before, "torch" in sys.modules, type(y).__name__, y.shape, status]))
"""
    before, after, kind, shape, status = serve(models, code)
    assert (before, after, kind, shape) == (False, True, "ndarray", [100, 4])
    assert status["through_torch"][""] == "a miss: x.shape[0]: expected 1..32, got 100"
    assert status["import_torch_s"] > 0
    assert (status["hits"], status["misses_by_tier"]) == (0, {"program": 1})


def test_hits_of_new_sizes_do_not_wait_for_an_import_of_torch(models: Path) -> None:
    code = """
import importlib.machinery

entry = apr.load(bundle)["mlp"]
entry(rows(2))
begun, go, returned = [threading.Event() for _ in range(3)]

class Slow:
    def find_spec(self, name, *rest):
        spec = importlib.machinery.PathFinder.find_spec(name, *rest) if name == "torch" else None
        if spec is not None:
            spec.loader.exec_module = self.wait
        return spec

    def wait(self, module):
        begun.set()
        go.wait(20)
        raise ModuleNotFoundError("no torch here")

def hits():
    for count in (3, 5):
        entry(rows(count))
    returned.set()

missing = threading.Thread(target=lambda: said.append(refused(entry, rows(100))))
said = []
sys.meta_path.insert(0, Slow())
missing.start()
begun.wait(20)
threading.Thread(target=hits).start()
in_time = returned.wait(10)
go.set()
missing.join()
print(json.dumps([in_time, said[0], "torch" in sys.modules]))
"""
    in_time, said, imported = serve(models, code)
    assert in_time
    assert "cannot be imported: ModuleNotFoundError: no torch here" in said
    assert not imported


def test_strict_raises_a_guard_miss_without_torch(models: Path) -> None:
    code = """
entry = apr.load(bundle, mode="strict")["mlp"]
print(json.dumps([refused(entry, rows(100)), refused(entry, rows(2)), "torch" in sys.modules, entry.counts()["errors"]]))
"""
    said, hit, imported, errors = serve(models, code)
    assert said.startswith("GuardMiss: mlp: no variant fits this call")
    assert (hit, imported, errors) == ("returned", False, 1)


def test_tensors_of_torch_work_in_the_same_session_over_the_same_weights_and_state(models: Path) -> None:
    code = """
session = apr.load(bundle)
running, mlp = session["running"], session["mlp"]
by_arrays = [running(rows(2, 4)).tolist()]
import torch
by_tensors = running(torch.from_numpy(rows(2, 4)))
by_arrays.append(running(rows(2, 4)).tolist())
other = apr.load(bundle, tensors="torch")["running"]
wanted = [other(torch.from_numpy(rows(2, 4))).tolist() for _ in range(3)]
same = [by_arrays[0], by_tensors.tolist(), by_arrays[1]] == wanted
session.update_weights({"second.bias": torch.full((4,), 3.0)})
session.update_weights({"second.bias": np.array([9, 0, 0, 0], np.float32)})
a, b = mlp(rows(1)), mlp(torch.from_numpy(rows(1)))
print(json.dumps([same, isinstance(by_tensors, torch.Tensor), a.tolist() == b.tolist(), float(a[0, 0]) > 0.99]))
"""
    assert serve(models, code) == [True, True, True, True]


def test_a_package_with_operators_of_its_own_is_served_through_torch() -> None:
    bundle = custom_operator_cases.bundle()
    code = """
session = apr.load(bundle)
name = list(session)[0]
entry = session[name]
variant = entry.variants[0]
session.warmup("all")
print(json.dumps([name, entry.counts()["through_torch"], "torch" in sys.modules]))
"""
    _, reasons, imported = serve(bundle, code, bundle.parent)
    assert imported
    assert any(
        "has operators without a C shim (model.json), which torch runs" in reason for reason in reasons.values()
    ), reasons


# ---------------------------------------------------------------------------------------------------------- weights


def test_weights_are_replaced_by_arrays_all_or_nothing(models: Path) -> None:
    code = """
session = apr.load(bundle)
entry = session["mlp"]
one, two = entry(rows(1)), entry(rows(8))
bias = np.array([5, 0, 0, 0], np.float32)
bad = [
    refused(session.update_weights, {"second.bias": bias, "second.wieght": bias}),
    refused(session.update_weights, {"second.bias": bias.astype(np.float64)}),
    refused(session.update_weights, {"second.bias": bias[:3]}),
    refused(session.update_weights, {"second.bias": [5, 0, 0, 0]}),
]
unchanged = bool((entry(rows(1)) == one).all())
for _ in range(3):
    session.update_weights({"second.bias": bias})
changed = [float(entry(rows(1))[0, 0]) > 0.9, float(entry(rows(8))[7, 0]) > 0.9]
print(json.dumps([bad, unchanged, changed, "torch" in sys.modules]))
"""
    bad, unchanged, changed, imported = serve(models, code)
    assert "did you mean second.weight" in bad[0]
    assert bad[1] == "WeightsError: second.bias: expected float32 [4], got float64 [4]"
    assert bad[2] == "WeightsError: second.bias: expected float32 [4], got float32 [3]"
    assert bad[3] == "WeightsError: second.bias: expected an array, got list"
    assert (unchanged, changed, imported) == (True, [True, True], False)


def test_tied_and_turned_weights_are_replaced_as_their_names_say() -> None:
    code = """
session = apr.load(bundle)
entry = session["turned"]
up, down, x = rows(6, 4), rows(3, 4), rows(2, 6)
said = refused(session.update_weights, {"down.weight": down, "again.weight": down + 1})
session.update_weights({"up": up, "down.weight": down})
hidden = x @ up
wanted = hidden @ down.T + np.maximum(hidden, 0) @ down.T
session.update_weights({"up": np.asfortranarray(up)})
print(json.dumps([said, bool(np.allclose(entry(x), wanted, atol=1e-5)), "torch" in sys.modules]))
"""
    said, right, imported = serve(array_cases(), code)
    assert said.startswith("WeightsError: down.weight and again.weight are one tied tensor")
    assert (right, imported) == (True, False)


BACKWARDS = """
def backwards(session):
    weight = rows(4, 32)
    session.update_weights({"second.weight": weight, "second.bias": np.zeros(4, np.float32)})
    wanted = session["mlp"](rows(8))
    turned = np.ascontiguousarray(weight[::-1, ::-1])[::-1, ::-1]
    turned.flags.writeable = False
    session.update_weights({"second.weight": turned})
    session.update_weights({"second.bias": apr.Array(bytes(16), "float32")})
    return bool((session["mlp"](rows(8)) == wanted).all())
"""


def test_weights_with_steps_backwards_are_replaced(models: Path) -> None:
    code = """
print(json.dumps([backwards(apr.load(bundle)), "torch" in sys.modules]))
"""
    assert serve(models, code, start=START + BACKWARDS) == [True, False]


def test_torch_may_be_imported_elsewhere_while_calls_run_and_weights_are_replaced(models: Path) -> None:
    code = """
import time

session = apr.load(bundle, mode="eager")
entry, running = session["mlp"], session["running"]
x, going, said = rows(8), True, set()
sets = [{"second.bias": np.array([k, 0, 0, 0], np.float32)} for k in (0, 4)]

def repeat(*works):
    while going:
        for work in works:
            try:
                work()
            except Exception as error:
                said.add(f"{type(error).__name__}: {error}")

def fresh():
    with apr.load(bundle, tensors="array") as other:
        other["embed"](np.array([[1, 2, 3]]))

threads = [
    threading.Thread(target=repeat, args=works)
    for works in (
        [lambda: entry(x), lambda: running(rows(2, 4))],
        [lambda: session.update_weights(sets[0]), lambda: session.update_weights(sets[1])],
        [fresh],
    )
]
[thread.start() for thread in threads]
time.sleep(0.1)
import torch
entry(rows(100))  # a miss: torch's tensors lead from now on, between a check of weights and their replacement
time.sleep(0.3)
going = False
[thread.join() for thread in threads]
print(json.dumps([sorted(said), backwards(session)]))
"""
    assert serve(models, code, start=START + BACKWARDS) == [[], True]


def test_threads_see_one_set_of_weights_whole_while_it_is_replaced(models: Path) -> None:
    code = """
session = apr.load(bundle)
entry, x = session["mlp"], rows(8)
sets = [{"first.bias": np.full(32, k, np.float32), "second.bias": np.array([k, 0, 0, 0], np.float32)} for k in (0, 4)]
wanted = []
for one in sets:
    session.update_weights(one)
    wanted.append(entry(x).tobytes())
found, going = [set() for _ in range(4)], True

def calls(seen):
    while going:
        seen.add(entry(x).tobytes())

threads = [threading.Thread(target=calls, args=(seen,)) for seen in found]
[thread.start() for thread in threads]
for number in range(200):
    session.update_weights(sets[number % 2])
going = False
[thread.join() for thread in threads]
everything = set().union(*found)
print(json.dumps([everything <= set(wanted), len(everything)]))
"""
    assert serve(models, code) == [True, 2]


@pytest.mark.parametrize("tensors", ["array", "torch"])
def test_a_warm_up_that_a_session_is_closed_under_says_so_and_nothing_is_set_aside(models: Path, tensors: str) -> None:
    code = f"""
import time

said, aside = [], []
for pause in (0, 0.01, 0.03, 0.1, 0.2):
    session = apr.load(bundle, tensors={tensors!r}, source="never")
    warming = threading.Thread(target=lambda: said.append(refused(session.warmup, "all")))
    warming.start()
    time.sleep(pause)
    session.close()
    warming.join()
    aside += [entry["skipped"] for entry in session.status()["entries"].values() if entry["skipped"]]
print(json.dumps([said, aside]))
"""
    said, aside = serve(models, code)
    assert {words.partition(":")[0] for words in said} <= {"SessionClosed", "returned"}, said
    assert aside == []


def test_state_is_kept_between_calls_and_put_back_by_a_warm_up(models: Path) -> None:
    code = """
session = apr.load(bundle)
running = session["running"]
session.warmup("all")
assert running.counts()["loaded"] and running.counts()["hits"] == len(running.variants)
first = running(rows(2, 4)).tolist()
session.warmup("all")
second = running(rows(2, 4)).tolist()
other = apr.load(bundle, tensors="array")["running"]
print(json.dumps([[other(rows(2, 4)).tolist() for _ in range(2)] == [first, second], first != second, session.status()["ready"]]))
"""
    assert serve(models, code) == [True, True, True]


# ---------------------------------------------------------------------------------------------------- what may be wrong


def test_many_calls_leave_no_memory_behind(models: Path) -> None:
    code = """
entry = apr.load(bundle)["embed"]
ids = np.array([[1, 2, 3]])

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

for _ in range(60_000):  # a pool of the allocator grows once, by 1.8 MB, somewhere in the first 50,000
    entry(ids)
before = resident()
for _ in range(60_000):
    entry(ids)
print(json.dumps(resident() - before))
"""
    assert serve(models, code) < 1_000_000


@pytest.mark.parametrize(
    ("version", "library", "said"),
    [
        pytest.param("2.10.0", None, "its C interface is known for 2.11 and newer", id="too-old"),
        pytest.param("2.99.0", None, "its C interface is known for 2.11 and newer, below 2.15", id="too-new"),
        pytest.param("2.12.0", "real", "holds version 2.13, beside it stands 2.12.0", id="another-version"),
        pytest.param("2.13.0", None, "libtorch_cpu.so: cannot open shared object file", id="missing"),
        pytest.param("2.13.0", "text", "libtorch_cpu.so: ", id="not-a-library"),
    ],
)
def test_a_libtorch_that_cannot_be_used_is_one_clear_error(
    models: Path, tmp_path: Path, version: str, library: str | None, said: str
) -> None:
    import torch

    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "version.py").write_text(f"__version__ = '{version}'\n")
    (folder / "__init__.py").write_text("raise OSError('this torch is broken')\n")
    if library == "real":
        (folder / "lib").symlink_to(Path(torch.__file__).parent / "lib")
    else:
        (folder / "lib").mkdir()
    if library == "text":
        (folder / "lib" / "libtorch_cpu.so").write_text("not a library")
    code = """
entry = apr.load(bundle, allow=["torch", "torch_min"])["mlp"]
print(json.dumps([refused(entry, rows(1)), entry.counts()["through_torch"]]))
"""
    error, _ = serve(models, code, tmp_path)
    assert error.startswith("ArtifactError: mlp: is served through torch (")
    assert said in error
    assert "this torch is broken" in error


def test_a_host_without_torch_is_told_so(models: Path) -> None:
    code = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else found(name, *rest)
sys.modules["torch"] = None
entry = apr.load(bundle, allow=["torch", "torch_min"])["mlp"]
print(json.dumps([refused(entry, rows(1)), refused(apr.load, bundle)]))
"""
    call, load = serve(models, code)
    assert call.startswith("MissingDependency: the package 'torch' is needed for mlp")
    assert load.startswith("TargetMismatch")
    assert "torch is not installed" in load


def test_a_cuda_session_on_a_host_without_a_gpu_is_refused(models: Path) -> None:
    code = """
print(json.dumps(refused(apr.load, bundle, device="cuda")))
"""
    assert serve(models, code).startswith("TargetMismatch: device 'cuda' does not fit this host")
