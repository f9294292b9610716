"""The C++ client under attack: broken and forged bundles, calls that nobody may make. Each ends in one line that says
what is wrong, and what Python's runtime refuses the client refuses too.

`AOTPACK_TEST_CXXFLAGS='-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -D_GLIBCXX_ASSERTIONS'` runs all
of it in a client that watches itself.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aotpack_runtime.errors import AotpackError
from aotpack_runtime.format import index_json
from tests.hostile.test_bundles import (
    HEADERS,
    RECORDS,
    TEXTS,
    _paths,
    _put,
    endless,
    fifo,
    folder,
    header,
    loop,
    missing,
    tensor,
)
from tests.support.bundles import index_record, write_bundle
from tests.support.cpp_client import CXX, built_client

pytestmark = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")

GARBAGE: list[Any] = [
    None,
    True,
    -1,
    1.5,
    2**63,
    10**30,
    "",
    "x",
    "\ud800",
    [],
    [None],
    {},
    {"a": 1},
    "x.shape[0]",
    "1//0",
]
ENOUGH_S = 20


@pytest.fixture(scope="module")
def client() -> Path:
    return built_client()


def run(*command: Any, lines: str = "", code: int | None = 0) -> subprocess.CompletedProcess[str]:
    words, environment = [str(word) for word in command], {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        words, input=lines, capture_output=True, text=True, check=False, timeout=ENOUGH_S, env=environment
    )
    assert code is None or done.returncode == code, (done.returncode, done.stderr[-2000:])
    return done


def read_indexes(client: Path, texts: list[bytes], place: Path) -> list[str]:
    """What the client says of each: "ok", or why not."""
    place.write_bytes(b"".join(len(text).to_bytes(8, "little") + text for text in texts))
    answers = run(client / "readers", "index", place).stdout.splitlines()
    assert len(answers) == len(texts)
    assert all(len(answer) < 1000 for answer in answers)
    return answers


def is_read(text: bytes) -> bool:
    try:
        index_json.parse(text)
    except AotpackError:
        return False
    return True


def changed(path: Any, value: Any) -> bytes:
    index = index_record()
    _put(index, path, value)
    return json.dumps(index).encode()


def damaged(count: int) -> list[bytes]:
    """An index with bytes changed, taken out, put in and cut off."""
    whole, rng = json.dumps(index_record()).encode(), random.Random(7)
    pieces = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"0",
        b"-",
        b"1e5",
        b".5",
        b"\\",
        b"\0",
        b"\xff",
        b"\xc3",
        b"\\ud800",
        b"null",
    ]
    found: list[bytes] = []
    for _ in range(count):
        text, place = bytearray(whole), rng.randrange(len(whole))
        match rng.randrange(4):
            case 0:
                text[place] = rng.randrange(256)
            case 1:
                del text[place : place + rng.randrange(1, 20)]
            case 2:
                text[place:place] = rng.choice(pieces)
            case _:
                del text[place:]
        found.append(bytes(text))
    return found


def test_what_python_does_not_read_the_client_does_not_read(client: Path, tmp_path: Path) -> None:
    texts = [text for text, _ in TEXTS.values()]
    for mutate, _ in RECORDS.values():
        index = index_record()
        mutate(index)
        texts.append(json.dumps(index).encode())
    paths = list(_paths(index_record()))
    texts += [changed(path, value) for path in paths for value in GARBAGE]
    texts += damaged(600)
    answers = read_indexes(client, texts, tmp_path / "texts")
    read = [is_read(text) for text in texts]
    assert [text for text, answer, good in zip(texts, answers, read, strict=True) if answer == "ok" and not good] == []
    # It is stricter where Python takes any container or number; what both read is most of what Python reads.
    assert sum(answer == "ok" for answer in answers) > 0.8 * sum(read)


def test_a_good_index_is_read_in_each_version(client: Path, tmp_path: Path) -> None:
    texts = [json.dumps(index_record() | {"format": version}).encode() for version in index_json.READS]
    assert read_indexes(client, texts, tmp_path / "texts") == ["ok"] * len(texts)


@pytest.mark.parametrize("version", [0, 4, 1.0, "1", True, None], ids=repr)
def test_another_version_is_named(client: Path, tmp_path: Path, version: Any) -> None:
    (answer,) = read_indexes(client, [json.dumps(index_record() | {"format": version}).encode()], tmp_path / "text")
    assert answer.startswith("no: index.json: format version is")


def test_bounds_of_any_length_judge_as_pythons(client: Path, tmp_path: Path) -> None:
    """Sizes past 64 bits in guards, in ranges and in relations."""
    from aotpack_runtime.bundle import open_bundle
    from aotpack_runtime.dispatch import Dispatcher, Hit
    from aotpack_runtime.format.tensor import Call, TensorMeta
    from tests.journeys.test_cpp_client import judge, said, written

    relations = [
        "x.shape[0] * 9223372036854775807 > 1", "x.shape[0] // (x.shape[1] - 4) == 1", "x.shape[0] % 0 == 0",
        "-x.shape[0] // 3 == -1", "ceil_div(x.shape[0], 3) == 1", "not x.shape[0] == 3", "min(x.shape[0], 9, 1) == 1",
        "1 < x.shape[0] <= 2 or x.shape[0] == 77", "x.shape[0] % -3 == -1",
    ]  # fmt: skip
    dims: list[Any] = [[2, 4], [[0, 10**30], 4], [[10**30, None], 4], [[-0, 2**63], [4, None]], [[3, 2], 4], [2**64, 4]]
    for where, wanted in [*(([one], dims[3]) for one in relations), *(([], each) for each in dims)]:
        index = index_record()
        guards = index["entries"]["encoder"]["variants"][0]["guards"]
        guards["where"], guards["leaves"][0]["dims"] = where, wanted
        bundle = write_bundle(tmp_path / f"{len(list(tmp_path.iterdir()))}", index)
        record = open_bundle(bundle).index.entries["encoder"]
        chosen = [variant for variant in record.variants if variant.target.device == "cpu"]
        dispatcher = Dispatcher(record.parameter_names, chosen)
        sizes = [(2, 4), (0, 4), (3, 4), (77, 4), (2, 5), (2**62, 4), (2**62, 2**62)]
        calls = [Call(("*",), (TensorMeta("float32", "cpu", size, (size[1], 1)),)) for size in sizes]
        found = judge(client, bundle, [json.dumps(written("encoder", call)) for call in calls])
        for call, ours in zip(calls, found, strict=True):
            decision = dispatcher.choose(call)
            assert isinstance(ours, str) == isinstance(decision, Hit), (where, wanted, call, ours)
            assert ours == said(decision)


MORE_HEADERS: Mapping[str, bytes] = {
    "shape-a-number": tensor(shape=4),
    "shape-an-object": tensor(shape={"4": 4}),
    "shape-a-float": tensor(shape=[4.0]),
    "shape-past-64-bits": tensor(shape=[10**30]),
    "shape-of-two-halves-of-all-memory": tensor(shape=[2**33, 2**33]),
    "offsets-past-64-bits": tensor(data_offsets=[0, 10**30]),
    "offsets-wrap": tensor(data_offsets=[2**63 - 8, 2**63 - 8 + 16]),
    "offsets-an-object": tensor(data_offsets={"0": 0, "16": 16}),
    "surrogates": header('{"\\ud800\\ud800": 7}'),
    "ends-in-an-escape": header('{"a\\'),
    "ends-in-half-a-character": header(b'{"\xe2\x82'),
}


def test_a_weights_file_that_lies_is_refused(client: Path, tmp_path: Path) -> None:
    names = {**HEADERS, **MORE_HEADERS}
    for name, data in names.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "good").write_bytes(tensor())
    (tmp_path / "misaligned").write_bytes(header('{"scale":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}   '))
    found = run(client / "readers", "weights", tmp_path, *names, "good", "misaligned").stdout.splitlines()
    assert found[-2:] == ["ok", "ok"]
    for name, answer in zip(names, found, strict=False):
        assert answer.startswith(f"no: {name}: is "), answer


@pytest.mark.parametrize("make", [missing, folder, fifo, endless, loop], ids=lambda make: make.__name__)
def test_an_index_that_is_no_file_is_refused_at_once(
    client: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    bundle = write_bundle(tmp_path / "b")
    make(bundle / "index.json")
    assert "index.json: " in run(client / "aotpack-judge", bundle, code=1).stderr


def test_a_place_that_is_no_bundle_is_named(client: Path, tmp_path: Path) -> None:
    archive = tmp_path / "demo.aotpack"
    archive.write_bytes(b"PK")
    for place, words in ((tmp_path / "nowhere", "No such file"), (archive, "is not a folder; unpack")):
        assert f"{place}: {words}" in run(client / "aotpack-serve", place, "encoder", tmp_path, code=1).stderr
