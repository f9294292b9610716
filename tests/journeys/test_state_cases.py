"""Cases A13, A14, A15, A29, A30 and their kind: what a model keeps, what it is told to keep, and what is around it."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from aotpack.jobs import Result
from aotpack_runtime import Session, WeightsError, load
from aotpack_runtime.loaders import aoti, tensors
from aotpack_runtime.torch_entry import TorchEntry
from tests.support import custom_operator_cases, output_state_cases
from tests.support.serving import (
    ONE_ELEMENT,
    WAYS,
    WEIGHTED,
    assert_same,
    imported,
    in_process,
    served,
    strided,
    wanting_gradients,
    wider,
)


@pytest.fixture(scope="session")
def bundle() -> Path:
    return output_state_cases.bundle()


@pytest.fixture(scope="session")
def refused() -> Result:
    return output_state_cases.refused()


@pytest.fixture(scope="module")
def zoo(bundle: Path) -> Iterator[ModuleType]:
    with imported(bundle.parent) as module:
        yield module


@pytest.fixture
def session(bundle: Path, zoo: ModuleType) -> Iterator[Session]:
    with load(bundle, mode="eager") as loaded:
        yield loaded


tiers = pytest.mark.parametrize("tier", list(WAYS))
ONES = torch.ones(2, 4)
SERIES = [[1, 2, 3, 4], [1.5, 3, 4.5, 6], [1.75, 3.5, 5.25, 7]]


# ----------------------------------------------------------------------------------------------------- A13: buffers


@pytest.mark.parametrize("second", list(WAYS))
def test_a13_one_state_whatever_serves(session: Session, second: str) -> None:
    ema = session["ema"]
    served_by = []
    for way, row in zip(("hit", second, "hit"), SERIES, strict=True):
        tier, out = served(ema, WAYS[way](ONES))
        served_by.append(tier)
        assert out[0].tolist() == row
    assert served_by == ["hit", second, "hit"]


def test_a13_each_session_has_a_state_of_its_own(bundle: Path, zoo: ModuleType) -> None:
    with load(bundle, mode="eager") as first, load(bundle, mode="eager") as second:
        assert first["ema"](ONES)[0].tolist() == SERIES[0]
        assert second["ema"](ONES)[0].tolist() == SERIES[0]
        assert first["ema"](strided(ONES))[0].tolist() == SERIES[1]
        assert second["ema"](wider(ONES))[0].tolist() == SERIES[1]
        assert first["ema"](ONES)[0].tolist() == SERIES[2]
    with load(bundle) as third:
        assert third["ema"](ONES)[0].tolist() == SERIES[0]


def test_a13_a_non_persistent_buffer_is_in_the_bundle(session: Session, zoo: ModuleType) -> None:
    assert "s" not in zoo.make("Ema").state_dict()
    session.update_weights({"s": torch.full((4,), 2.0)})
    assert session["ema"](ONES)[0].tolist() == [2] * 4


@pytest.mark.parametrize("ways", [["hit"] * 3, ["program"] * 3, ["source"] * 3, ["source", "hit", "program"]])
def test_a13_a_buffer_that_is_replaced_counts_on(session: Session, ways: list[str]) -> None:
    found = [served(session["reassigns"], ONE_ELEMENT[way](torch.ones(1))) for way in ways]
    assert [tier for tier, _ in found] == ways
    assert [out.item() for _, out in found] == [2, 3, 4]


def test_a13_variants_and_fallbacks_of_an_entry_share_its_state(session: Session) -> None:
    counter = session["counter"]
    calls = [torch.zeros(size, dtype=torch.int64) for size in (2, 3, 5, 2)] + [torch.zeros(3, dtype=torch.int32)]
    found = [served(counter, x) for x in calls]
    assert [tier for tier, _ in found] == ["hit", "hit", "program", "hit", "source"]
    assert [out[0].item() for _, out in found] == [1, 2, 3, 4, 5]
    assert len(counter.counts()["hits_by_variant"]) == 2


def test_a13_state_that_only_the_source_writes_reaches_every_tier(bundle: Path, session: Session) -> None:
    entry, one = session["sometimes_counts"], torch.ones(1)
    assert_series(
        entry, [((one,), 1), ((one, 2), 3), ((one,), 3), ((wanting_gradients(one),), 3), ((one, 1), 4), ((one,), 4)]
    )
    with load(bundle, mode="eager") as other:
        assert other["sometimes_counts"](one).item() == 1


@pytest.mark.parametrize("tier", ["hot", "all"])
def test_a13_warmup_leaves_the_state_as_it_was(session: Session, tier: Any) -> None:
    session["ema"](ONES)
    seconds = session.warmup(tier)
    assert {"ema/fixed/cpu", "reassigns/fixed/cpu"} <= seconds.keys()
    assert session["ema"](ONES)[0].tolist() == SERIES[1]
    assert session["reassigns"](torch.ones(1)).item() == 2
    assert session["counter"](torch.zeros(2, dtype=torch.int64)).tolist() == [1, 1]


def test_a13_an_update_of_a_state_buffer_is_where_calls_go_on(session: Session) -> None:
    ema = session["ema"]
    ema(ONES)
    session.update_weights({"h": torch.zeros(2, 4)})
    for way, row in zip(WAYS, SERIES, strict=True):
        tier, out = served(ema, WAYS[way](ONES))
        assert (tier, out[0].tolist()) == (way, row)


def test_a13_a_state_made_in_inference_mode_is_written_outside_of_it(session: Session) -> None:
    with torch.inference_mode():
        assert session["ema"](strided(ONES))[0].tolist() == SERIES[0]
    for way, row in zip(("program", "source"), SERIES[1:], strict=True):
        tier, out = served(session["ema"], WAYS[way](ONES))
        assert (tier, out[0].tolist()) == (way, row)
    session.update_weights({"h": torch.zeros(2, 4)})
    assert session["ema"](ONES)[0].tolist() == SERIES[0]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            "plain_in_place",
            ["neither a parameter nor a buffer at zoo.py:", "(torch.float32 of shape [1])", "register_buffer"],
        ),
        ("packed", ["quantized.LinearPackedParamsBase", "torchao", "buffers"]),
        ("plain_assigned", ["disagrees with eager", "forward() sets n:", "register_buffer()"]),
        ("counts_in_python", ["disagrees with eager", "forward() sets calls:", "register_buffer()"]),
        ("grows", ["'seen'", "another shape"]),
        ("overlapping_state", ["'row'", "'table'", "shares memory"]),
    ],
)
def test_a13_state_that_cannot_be_kept_is_refused(refused: Result, entry: str, words: list[str]) -> None:
    message = refused.failures[f"{entry}/fixed/cpu"]
    for word in words:
        assert word in message, message


# ------------------------------------------------------------------------------------------- A14: tied weights, swaps


@tiers
@pytest.mark.parametrize("names", [["a.weight"], ["b.weight"], ["a.weight", "b.weight"]])
def test_a14_either_name_of_a_tied_weight_updates_it(session: Session, tier: str, names: list[str]) -> None:
    x = WEIGHTED[tier](torch.ones(1, 4))
    served(session["tied"], x)
    session.update_weights({name: 2 * torch.eye(4) for name in names})
    found_tier, out = served(session["tied"], x)
    assert (found_tier, out.unique().tolist()) == (tier, [4])


def test_a14_a_tied_weight_may_be_the_other_one_turned(session: Session, zoo: ModuleType) -> None:
    image, x = torch.randn(1, 3, 6, 6), torch.randn(2, 5)
    decoder = torch.randn(5, 3)
    model = zoo.make("OddWeights")
    for way in WEIGHTED.values():
        session.update_weights({"odd_weights:decoder.weight": decoder})
        model.decoder.weight.data = decoder
        model.encoder.weight.data = decoder.t()
        assert_same(model(image, way(x))["autoencoder"], session["odd_weights"](image, way(x))["autoencoder"])
        decoder = decoder * 2


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ({"a.weight": torch.eye(4), "b.weight": 2 * torch.eye(4)}, ["a.weight", "b.weight", "tied", "different"]),
        ({"w": torch.eye(4), "a.wieght": torch.eye(4)}, ["'a.wieght'", "a.weight"]),
        ({"tied:a.weights": torch.eye(4)}, ["'tied:a.weights'", "a.weight"]),
        ({"ema:a.weight": torch.eye(4)}, ["'ema:a.weight'"]),
        ({"a.weight": torch.eye(3)}, ["a.weight", "[4, 4]", "[3, 3]"]),
        ({"a.weight": torch.eye(4).double()}, ["a.weight", "float32", "float64"]),
        ({"a.weight": [[1.0] * 4] * 4}, ["a.weight", "expected a tensor", "list"]),
        ({"a.weight": None}, ["a.weight", "expected a tensor", "NoneType"]),
        ({"a.weight": torch.eye(4, device="meta")}, ["a.weight", "meta"]),
        ({"a.weight": torch.eye(4).to_sparse()}, ["a.weight", "sparse"]),
    ],
)
@pytest.mark.parametrize("beside", [{}, {"h": torch.ones(2, 4), "swaps:w": torch.ones(1024, 1024)}])
def test_a14_a_wrong_update_says_why_and_changes_nothing(
    session: Session, new: dict[str, Any], words: list[str], beside: dict[str, torch.Tensor]
) -> None:
    x, many = torch.ones(1, 4), torch.ones(2, 1024)
    before = [session["tied"](way(x)) for way in WEIGHTED.values()]
    session["ema"](ONES)
    with pytest.raises(WeightsError) as error:
        session.update_weights({**beside, **new})
    for word in words:
        assert word in str(error.value)
    assert [torch.equal(a, session["tied"](way(x))) for a, way in zip(before, WEIGHTED.values(), strict=True)] == [
        True
    ] * 3
    assert session["ema"](ONES)[0].tolist() == SERIES[1]
    assert session["swaps"](many).unique().tolist() == [2]


def test_a14_equal_values_for_a_tied_weight_may_hold_nan(session: Session) -> None:
    weight = torch.full((4, 4), float("nan"))
    session.update_weights({"a.weight": weight, "b.weight": weight.clone()})
    assert session["tied"](torch.ones(1, 4)).isnan().all()


def test_a14_a_tied_table_is_stored_once(bundle: Path, session: Session, zoo: ModuleType) -> None:
    refs = session.bundle.index.weight_sets["tied_table"].weights
    assert refs["embedding.weight"] == refs["head.weight"]
    (file,) = (bundle / "weights").iterdir()
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    sizes = [
        end - begin
        for name, record in header.items()
        if name.startswith("tied_table/")
        for begin, end in [record["data_offsets"]]
    ]
    assert sizes == [1000 * 512 * 4]
    ids = torch.tensor([3, 999])
    for tier, way in (("hit", ids), ("source", ids.int())):
        found_tier, out = served(session["tied_table"], way)
        assert found_tier == tier
        assert_same(zoo.make("TiedTable")(way), out)


def test_a14_weights_of_every_layout_and_kind_give_what_eager_gives(session: Session, zoo: ModuleType) -> None:
    image, x, model = torch.randn(1, 3, 6, 6), torch.randn(2, 5), zoo.make("OddWeights")
    assert not model.transposed.is_contiguous()
    assert model.expanded.stride() == (0, 1)
    for arguments, wanted_tier in (((image, x), "hit"), ((strided(image), x), "program")):
        tier, found = served(session["odd_weights"], *arguments)
        assert tier == wanted_tier
        assert_same(model(*arguments), found)
    tier, found = served(session["odd_weights"], image, x[None])
    assert tier == "source"
    assert_same(model(image, x[None]), found)


@pytest.mark.parametrize("tier", list(WEIGHTED))
def test_a_weight_that_is_made_of_tensors_is_taken_apart(session: Session, zoo: ModuleType, tier: str) -> None:
    """As torchao's int8 weights are; by hand torch.export and AOTInductor take them."""
    x, model, quantized = torch.randn(5, 4), zoo.make("Quantized"), session["quantized"]
    wanted = model(WEIGHTED[tier](x))
    served_by, found = served(quantized, WEIGHTED[tier](x))
    assert served_by == tier
    assert_same(wanted, found)
    scale = "linear.parametrizations.weight.original1"
    session.update_weights({scale: 2 * model.linear.weight.scale_})
    assert_same(2 * wanted - model.linear.bias, quantized(WEIGHTED[tier](x)))


NEW_WEIGHTS = {
    "conv.weight": torch.randn(4, 3, 3, 3),
    "norm.running_mean": torch.randn(4),
    "norm.weight": torch.randn(4),
    "transposed": torch.randn(5, 3),
    "expanded": torch.randn(3, 5),
    "turned": torch.randn(4, 2, 3),
    "spread": torch.randn(3, 2),
    "part": torch.randn(3),
    "zero_d": torch.tensor(-7.5),
    "whole": torch.tensor(11),
    "three": torch.tensor([-1.0, 0.0, 9.0]),
}


@tiers
@pytest.mark.parametrize("loaded", [True, False], ids=["after-a-call", "before-any-call"])
@pytest.mark.parametrize(
    "names",
    [[name] for name in NEW_WEIGHTS] + [list(NEW_WEIGHTS)],
    ids=lambda names: names[-1] if len(names) == 1 else "all",
)
def test_a14_nothing_is_baked_in_every_update_is_followed(
    session: Session, zoo: ModuleType, tier: str, names: list[str], *, loaded: bool
) -> None:
    image, x = torch.randn(1, 3, 6, 6), WEIGHTED[tier](torch.randn(2, 5))
    entry = session["odd_weights"]
    if loaded:
        entry(image, x)
    session.update_weights({f"odd_weights:{name}": NEW_WEIGHTS[name] for name in names})
    model = zoo.make("OddWeights")
    for name in names:
        owner, _, leaf = name.rpartition(".")
        target = model.get_submodule(owner)
        table = target._parameters if leaf in target._parameters else target._buffers
        table[leaf] = torch.nn.Parameter(NEW_WEIGHTS[name]) if leaf in target._parameters else NEW_WEIGHTS[name].clone()
    found_tier, found = served(entry, image, x)
    assert found_tier == tier
    with torch.no_grad():
        assert_same(model(image, x), found)


def test_an_update_takes_any_tensor_and_copies_it(session: Session) -> None:
    tied, x = session["tied"], torch.ones(1, 4)
    given = torch.nn.Parameter((2 * torch.eye(4)).t())
    with torch.inference_mode():
        session.update_weights({"a.weight": given.detach() * 1})
    assert tied(x).tolist() == [[4] * 4]
    session.update_weights({"a.weight": given})
    with torch.no_grad():
        given.zero_()
    assert tied(x).tolist() == [[4] * 4]
    session.update_weights({"a.weight": torch.ones(1).expand(4, 4)})
    assert [tied(way(x)).unique().tolist() for way in WEIGHTED.values()] == [[16]] * 3


# -------------------------------------------------------------------------------------------------------- A15: mode


def test_a15_a_module_in_train_mode_is_refused(refused: Result) -> None:
    message = refused.failures["train_mode/fixed/cpu"]
    assert "train mode" in message
    assert ".eval()" in message
    assert "training: true" in message


def test_an_error_inside_a_library_names_its_line_behind_the_users_own(refused: Result) -> None:
    message = refused.failures["translates/fixed/cpu"]
    assert re.search(r"depends on the values of a tensor at zoo.py:\d+ \(in transformer.py:\d+\)", message), message


def test_a15_training_that_was_asked_for_is_written_down_and_learns(session: Session, zoo: ModuleType) -> None:
    assert session.bundle.index.entries["learns"].training
    assert not session.bundle.index.entries["linear"].training
    x, reference = torch.randn(8, 4), zoo.learns()
    for tier, way in {"hit": torch.clone, "program": strided}.items():
        found_tier, out = served(session["learns"], way(x))
        assert found_tier == tier
        assert 0 < (out == 0).float().mean() < 1  # the dropout drops
        reference(x)
        assert_same(dict(sorted(reference.named_buffers())), state(session, "learns"))


def test_a15_autocast_that_the_build_did_not_have_is_a_miss(session: Session, zoo: ModuleType) -> None:
    linear, x, model = session["linear"], torch.randn(2, 4), zoo.make("linear")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast is on for cpu with torch.bfloat16" in str(linear.explain(x))
        tier, out = served(linear, x)
        assert_same(model(x), out)
    assert (tier, out.dtype) == ("program", torch.bfloat16)
    tier, out = served(linear, x)
    assert_same(model(x), out)
    assert (tier, out.dtype) == ("hit", torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        tier, out = served(linear, x)
        assert_same(model(x), out)
    assert (tier, out.dtype) == ("program", torch.float16)
    with torch.autocast("cpu", enabled=False):
        assert served(linear, x)[0] == "hit"


def test_a15_autocast_inside_the_model_holds_everywhere(session: Session, zoo: ModuleType) -> None:
    entry, x, model = session["inner_autocast"], torch.randn(2, 4), zoo.make("InnerAutocast")
    for tier, way in WEIGHTED.items():
        found_tier, out = served(entry, way(x))
        assert (found_tier, out.dtype) == (tier, torch.bfloat16)
        assert_same(model(way(x)), out)
    with torch.autocast("cpu", dtype=torch.float16):
        assert_same(model(x), entry(x))


@pytest.mark.parametrize("tier", ["program", "source"])
def test_a15_a_call_that_needs_gradients_gets_them(session: Session, zoo: ModuleType, tier: str) -> None:
    shape = {"program": (2, 4), "source": (1, 2, 4)}[tier]
    mine, theirs = (torch.ones(shape).requires_grad_() for _ in range(2))
    found_tier, out = served(session["linear"], mine)
    assert (found_tier, out.requires_grad) == (tier, True)
    out.sum().backward()
    zoo.make("linear")(theirs).sum().backward()
    assert_same(theirs.grad, mine.grad)


@tiers
def test_a15_what_eager_refuses_is_refused(session: Session, zoo: ModuleType, tier: str) -> None:
    x = WEIGHTED[tier](torch.ones(2, 5))  # Linear takes 4
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        zoo.make("linear")(x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        session["linear"](x)


def test_a15_no_grad_and_inference_mode_hit(session: Session) -> None:
    linear, x = session["linear"], torch.ones(2, 4)
    with torch.no_grad():
        tier, out = served(linear, x.clone().requires_grad_())
        assert (tier, out.requires_grad, out.is_inference()) == ("hit", False, False)
    with torch.inference_mode():
        tier, out = served(linear, x)
        assert (tier, out.is_inference()) == ("hit", True)
        made_here = torch.ones(2, 4)
        assert served(linear, made_here)[0] == "hit"
    assert served(linear, made_here)[0] == "hit"


@pytest.mark.parametrize("first", ["hit", "program", "source"])
def test_a15_gradients_flow_after_a_first_call_in_inference_mode(session: Session, first: str) -> None:
    entry = session["swaps"]
    with torch.inference_mode():
        assert served(entry, WEIGHTED[first](torch.ones(2, 1024)))[0] == first
    for x in (torch.ones(2, 1024), torch.ones(1, 2, 1024)):
        needs = x.requires_grad_()
        entry(needs).sum().backward()
        torch.testing.assert_close(needs.grad, torch.ones_like(needs))


def test_a15_the_same_seed_draws_the_same_numbers(session: Session) -> None:
    for way in WAYS.values():
        x, drawn = way(torch.zeros(64)), []
        for _ in range(2):
            torch.manual_seed(7)
            drawn.append([session["noise"](x) for _ in range(2)])
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert torch.equal(drawn[0][1], drawn[1][1])
        assert not torch.equal(drawn[0][0], drawn[0][1])
        assert 0 <= drawn[0][0].min() < drawn[0][0].max() < 1


def test_a15_values_of_a_random_model_are_not_compared_and_the_build_says_so(refused: Result) -> None:
    assert refused.verified["noise/fixed/cpu"]["compared_values"] is False
    assert refused.verified["fine/fixed/cpu"]["compared_values"] is True


# --------------------------------------------------------------------------------------------- A29: custom operators


def test_a29_a_server_imports_what_the_manifest_names(custom: Path) -> None:
    assert in_process(CUSTOM_CALL.format(bundle=str(custom), mode="strict"), custom.parent) == "[3.0, 3.0, 3.0] hit\n"
    assert in_process(CUSTOM_CALL.format(bundle=str(custom), mode="eager") + CUSTOM_FALLBACK, custom.parent) == (
        "[3.0, 3.0, 3.0] hit\n[3.0, 3.0, 3.0] program\n"
    )


def test_a29_a_server_without_the_module_is_told_the_operator_and_the_key(custom: Path) -> None:
    error = in_process(LOAD_ERROR.format(bundle=str(custom)))
    for word in ("ArtifactError", "apk::twice", "apk_ops", "imports"):
        assert word in error


def test_a29_an_operator_that_no_import_defines_is_refused_at_build_or_load(custom: Path, tmp_path: Path) -> None:
    message = custom_operator_cases.without_imports(tmp_path)
    for word in ("apk::twice", "entries.twice.imports"):
        assert word in message


def test_a29_a_changed_operator_is_refused_with_both_signatures(custom: Path, tmp_path: Path) -> None:
    (tmp_path / "apk_ops.py").write_text(custom_operator_cases.CHANGED)
    error = in_process(LOAD_ERROR.format(bundle=str(custom)), tmp_path)
    for word in ("ArtifactError", "apk::twice(Tensor x) -> Tensor", "apk::twice(Tensor x, float by) -> Tensor"):
        assert word in error


@pytest.mark.slow
def test_a29_threads_that_call_an_operator_written_in_python_do_not_wait_for_each_other_forever(custom: Path) -> None:
    assert in_process(CUSTOM_THREADS.format(bundle=str(custom)), custom.parent, timeout_s=120) == "done\n"


@pytest.fixture(scope="session")
def custom() -> Path:
    return custom_operator_cases.bundle()


CUSTOM_CALL = """
import sys, torch
from aotpack_runtime import load
session = load({bundle!r}, mode={mode!r}, source="never")
twice = session["twice"]
print(twice(torch.ones(3)).tolist(), "hit" if twice.counts()["hits"] else "miss")
"""
CUSTOM_FALLBACK = """
x = torch.ones(3, 2)[:, 0]
print(twice(x).tolist(), *twice.counts()["misses_by_tier"])
"""
LOAD_ERROR = """
from aotpack_runtime import load
try:
    load({bundle!r})
except Exception as error:
    print(type(error).__name__, error)
"""
CUSTOM_THREADS = """
import sys, threading, torch
from aotpack_runtime import load
session = load({bundle!r}, mode="strict")
twice, x, wrong, stop = session["twice"], torch.ones(3), [], threading.Event()
sys.setswitchinterval(1e-5)

def call():
    for _ in range(300):
        if twice(x).tolist() not in ([3.0] * 3, [7.0] * 3):
            wrong.append(1)

def swap():
    while not stop.is_set():
        for value in (5.0, 1.0):
            session.update_weights({{"w": torch.tensor([value])}})

swapper = threading.Thread(target=swap)
swapper.start()
threads = [threading.Thread(target=call) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
stop.set()
swapper.join()
print(*wrong, "done", sep="")
"""


# --------------------------------------------------------------------------------------------------- A30: concurrency


@pytest.mark.parametrize("way", ["hit", "program", "source"])
def test_a30_results_of_threads_are_those_of_one_thread(session: Session, way: str) -> None:
    session.update_weights({"swaps:w": torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) / 32})
    calls = [WEIGHTED[way](torch.randn(size, 1024)) for size in range(2, 34, 3)]
    wanted = [session["swaps"](x) for x in calls]
    before = session["swaps"].counts()

    def work(number: int) -> None:
        order = random.Random(number)
        for _ in range(200 if way == "hit" else 25):
            which = order.randrange(len(calls))
            torch.testing.assert_close(session["swaps"](calls[which]), wanted[which])

    in_threads(4, work)
    after = session["swaps"].counts()
    served_here = (
        after["hits"] - before["hits"] if way == "hit" else after["misses_by_tier"][way] - before["misses_by_tier"][way]
    )
    assert served_here == (800 if way == "hit" else 100)


@pytest.mark.parametrize("mixed", [False, True], ids=["hits", "every-tier"])
def test_a30_a_counter_counts_every_call_of_every_thread(session: Session, *, mixed: bool) -> None:
    counter = session["counter"]
    calls = [torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)]
    if mixed:
        calls += [torch.zeros(5, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)]
    seen: list[int] = []

    def work(number: int) -> None:
        seen.extend([int(counter(calls[(step + number) % len(calls)])[0]) for step in range(500)])

    in_threads(4, work)
    assert sorted(seen) == list(range(1, 2001))
    assert state(session, "counter")["n"] == 2000
    counts = counter.counts()
    assert counts["hits"] + counts["misses"] == 2000
    assert set(counts["misses_by_tier"]) == ({"program", "source"} if mixed else set())


@pytest.mark.parametrize("way", ["hit", "program", "source", "every-tier"])
def test_a30_a_call_sees_the_old_weights_or_the_new_ones_whole(session: Session, way: str) -> None:
    changes = list(WEIGHTED.values()) if way == "every-tier" else [WEIGHTED[way]]
    calls = [change(torch.ones(size, 1024)) for size in (2, 17, 33) for change in changes]
    values = [torch.full((1024, 1024), value / 1024) for value in (1.0, 3.0)]
    stop, swaps = threading.Event(), []
    session.update_weights({"swaps:w": values[0]})

    def swap() -> None:
        while not stop.is_set():
            for value in (values[1], values[0]):
                session.update_weights({"swaps:w": value})
                swaps.append(1)

    seen: set[float] = set()

    def work(number: int) -> None:
        for step in range(60 if way == "hit" else 20):
            found = session["swaps"](calls[(step + number) % len(calls)]).unique().tolist()
            assert found in ([2.0], [4.0]), found
            seen.update(found)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        in_threads(4, work)
    finally:
        stop.set()
        swapper.join(60)
    assert not swapper.is_alive()
    assert len(swaps) >= 4
    assert seen == {2.0, 4.0}
    assert (
        set(session["swaps"].counts()["misses_by_tier"])
        == {way: {way}, "hit": set(), "every-tier": {"program", "source"}}[way]
    )


def test_a30_updates_come_through_while_calls_never_pause(session: Session) -> None:
    x, values = torch.ones(33, 1024), [torch.full((1024, 1024), value / 1024) for value in (1.0, 3.0)]
    done = threading.Event()

    def work(number: int) -> None:
        if number:
            while not done.is_set():
                session["swaps"](x)
            return
        try:
            for step in range(20):
                session.update_weights({"swaps:w": values[step % 2]})
        finally:
            done.set()

    in_threads(4, work, timeout_s=30)


def test_a30_state_and_weights_of_one_update_are_seen_together(session: Session) -> None:
    """h == s * 2 + 1 before and after each update, so no call may see another pair."""
    ema, stop = session["ema"], threading.Event()
    pairs = [(torch.full((2, 4), 2.0), torch.full((4,), 3.0)), (torch.full((2, 4), 20.0), torch.full((4,), 30.0))]
    zeros = torch.zeros(2, 4)
    session.update_weights({"h": pairs[0][0], "s": pairs[0][1]})

    def swap() -> None:
        while not stop.is_set():
            for h, s in pairs:
                session.update_weights({"h": h, "s": s})

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:

        def work(number: int) -> None:
            for step in range(150):
                out = ema([zeros, strided(zeros), zeros.double()][(step + number) % 3])
                value = out.unique()
                assert len(value) == 1
                # h is 2 or 20, halved once or more since; s is 3 or 30 with it
                steps = [torch.log2(torch.tensor(h * s) / value).item() for h, s in ((2.0, 3.0), (20.0, 30.0))]
                assert any(step >= 1 and step == round(step) for step in steps), value

        in_threads(3, work)
    finally:
        stop.set()
        swapper.join(60)
    assert not swapper.is_alive()


def test_a30_a_first_call_of_many_threads_loads_once(
    bundle: Path, zoo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    original, original_weights = aoti.load, tensors.TorchWeights.__init__

    def counted(variant: Any, *rest: Any) -> Any:
        loads.append(variant.id)
        time.sleep(0.2)
        return original(variant, *rest)

    def counted_weights(self: Any, *rest: Any) -> None:
        loads.append("weights")
        time.sleep(0.05)
        original_weights(self, *rest)

    monkeypatch.setattr(aoti, "load", counted)
    monkeypatch.setattr(tensors.TorchWeights, "__init__", counted_weights)
    with load(bundle, mode="strict") as session:
        gate = threading.Barrier(8)

        def work(number: int) -> None:
            gate.wait(10)
            assert session["tied"](torch.ones(1, 4)).shape == (1, 4)

        in_threads(8, work)
        assert session["tied"].counts()["hits"] == 8
    assert sorted(loads) == ["tied/fixed/cpu", "weights"]


def test_a30_closing_while_a_variant_loads_does_not_hang(
    bundle: Path, zoo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load(bundle, mode="strict")
    loading, outcome = threading.Event(), []
    entry = session["tied"]
    assert isinstance(entry, TorchEntry)
    original = entry.weights

    def slow(name: str) -> Any:
        loading.set()
        time.sleep(0.3)
        return original(name)

    monkeypatch.setattr(session["tied"], "weights", slow)

    def call() -> None:
        try:
            outcome.append(session["tied"](torch.ones(1, 4)))
        except Exception as error:
            outcome.append(type(error).__name__)

    caller, closer = threading.Thread(target=call, daemon=True), threading.Thread(target=session.close, daemon=True)
    caller.start()
    assert loading.wait(10)
    closer.start()
    closer.join(30)
    caller.join(30)
    assert not closer.is_alive()
    assert not caller.is_alive()
    assert outcome == ["SessionClosed"]


# ------------------------------------------------------------------------------------------------ updates without end

MANY_UPDATES = """
import os, torch
from aotpack_runtime import load

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

session = load({bundle!r}, mode="eager")
swaps, x = session["swaps"], torch.ones(2, 1024)
ways = [x, torch.stack([x, x], -1)[..., 0], x[None]]
kept = [[swaps(way) for way in ways]]
values = [torch.full((1024, 1024), step / 1024) for step in (1.0, 2.0, 3.0)]
before = resident_bytes()
for step in range(50):
    session.update_weights({{"swaps:w": values[step % 3]}})
    kept.append([swaps(way) for way in ways])
grown = resident_bytes() - before
seen = [[result.unique().tolist() for result in results] for results in kept]
assert seen == [[[2.0]] * 3] + [[[step % 3 + 2.0]] * 3 for step in range(50)], seen
assert swaps.counts()["hits"] == 51 and swaps.counts()["misses_by_tier"] == {{"program": 51, "source": 51}}
print(grown)
"""


def test_fifty_updates_of_four_megabytes_grow_memory_by_less_than_twenty(bundle: Path) -> None:
    grown = int(in_process(MANY_UPDATES.format(bundle=str(bundle)), bundle.parent))
    assert grown < 20 * 2**20, f"{grown / 2**20:.1f} MiB"


# ----------------------------------------------------------------------------------------------------------- helpers


def assert_series(entry: Any, calls: list[tuple[tuple[Any, ...], float]]) -> None:
    assert [entry(*arguments).item() for arguments, _ in calls] == [wanted for _, wanted in calls]


def state(session: Session, entry: str) -> dict[str, torch.Tensor]:
    """The state of an entry, as the session holds it."""
    return session._weight_set(entry).snapshot()


def in_threads(count: int, work: Callable[[int], None], *, timeout_s: float = 60) -> None:
    """Run `work(number)` in threads; the first exception of any is raised, and none may take longer."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
