"""Bundles that are broken, forged or meant to harm: refused in one line that names what is wrong, before harm is done.

Nothing here needs torch: what a bundle says of itself is judged before anything of it is used.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pickle
import shutil
import stat
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aotpack_runtime import (
    AotpackError,
    BundleError,
    DigestMismatch,
    MalformedBundle,
    Session,
    UnsupportedFormat,
    load,
)
from aotpack_runtime.archive import pack_archive
from aotpack_runtime.bundle import open_bundle
from aotpack_runtime.format import index_json
from tests.support.bundles import (
    LIBRARY,
    Host,
    index_record,
    members,
    sha256,
    variant_record,
    write_bundle,
    write_zip,
    zip_bytes,
)

Json = Any


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where archives unpack: a folder of this test's own."""
    place = tmp_path / "cache"
    monkeypatch.setenv("AOTPACK_CACHE_DIR", str(place))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    return place


def unpacked(cache: Path) -> list[Path]:
    """Everything under the place where archives unpack, but for its lock."""
    return sorted(path for path in cache.rglob("*") if path.parent != cache and path.name != ".lock")


def session_of(bundle: Path, **more: Any) -> Session:
    return load(bundle, machine=Host(), mode="eager", source="never", **more)


def whole(**changed: bytes | None) -> dict[str, bytes]:
    """The files of a good bundle, in the order of an archive."""
    files = {"index.json": json.dumps(index_record()).encode(), **members()}
    return {name: data for name, data in {**files, **changed}.items() if data is not None}


def test_the_bundle_made_by_hand_is_a_good_one(tmp_path: Path) -> None:
    """What the other tests of this file change one thing of."""
    session = session_of(write_bundle(tmp_path / "good"))
    assert session.verdict == "fits"
    session.bundle.verify()
    assert session["encoder"].record.parameter_names == ("x",)


# ------------------------------------------------------------------------------------- A21: no bundle at all


A21: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "half": (lambda at: at.write_bytes(zip_bytes(whole())[: len(zip_bytes(whole())) // 2]), "is truncated: "),
    "no-end": (lambda at: at.write_bytes(zip_bytes(whole())[:-10]), "is truncated: "),
    "empty": (lambda at: at.write_bytes(b""), "is empty (0 bytes)"),
    "html": (
        lambda at: at.write_bytes(b"<!DOCTYPE html><html>404</html>"),
        "is not a bundle: it looks like an HTML page",
    ),
    "other": (lambda at: at.write_bytes(b"\x80\x04 anything"), "is not a bundle: it looks like another format"),
    "directory": (lambda at: at.mkdir(), "is a directory without index.json, not a bundle"),
    "missing": (lambda at: None, "no such file or directory"),
    "no-index": (lambda at: write_zip(at, {"readme.txt": b"hello"}), "is a zip without index.json, not a bundle"),
    "empty-zip": (lambda at: write_zip(at, {}), "is a zip without index.json, not a bundle"),
    "fifo": (os.mkfifo, "is not a file or folder"),
    "socket-like": (lambda at: os.symlink("/dev/zero", at), "is not a file or folder"),
}


@pytest.mark.parametrize("what", A21)
def test_a21_what_is_no_bundle_is_called_what_it_is(what: str, tmp_path: Path, cache: Path) -> None:
    place = tmp_path / "model.aotpack"
    make, words = A21[what]
    make(place)
    with pytest.raises(BundleError) as caught:
        open_bundle(place)
    assert caught.value.message.startswith(f"{place}: {words}")
    assert "\n" not in str(caught.value)
    assert unpacked(cache) == []


@pytest.mark.parametrize("name", ["model.zip", "model.pt2", "model", "model.aotpack"])
def test_a21_a_good_archive_opens_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    archive = write_zip(tmp_path / name, whole())
    with session_of(archive) as session:
        session.bundle.verify()


def test_a21_every_kind_of_wrong_file_has_a_message_of_its_own() -> None:
    assert len({words for _, words in A21.values()}) == 8


# ------------------------------------------------------------------------------------- A38: hostile archives


def plain(name: str, data: bytes = b"evil", **attributes: Any) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info, data


def archive_of(path: Path, *extra: tuple[zipfile.ZipInfo, bytes]) -> Path:
    """A good bundle's files and then `extra`, written as they are."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in whole().items():
            archive.writestr(name, data)
        for info, data in extra:
            archive.writestr(info, data)
    return path


def bomb(path: Path) -> Path:
    """A member of 10 GB (as the index agrees) that is 10 kB in the archive."""
    index = index_record()
    record = index["entries"]["encoder"]["variants"][0]["artifact"]
    record["files"]["model.so"]["bytes"] = 10_000_000_000
    member = f"artifacts/{record['digest']}/model.so"
    files = {**whole(), "index.json": json.dumps(index).encode(), member: bytes(10_000_000)}
    return _lie(write_zip(path, files, zipfile.ZIP_DEFLATED), member, 10_000_000_000)


def _lie(path: Path, member: str, size: int) -> Path:
    """Say in the central directory that `member` unpacks to `size` bytes."""
    data = bytearray(path.read_bytes())
    at = data.rindex(member.encode()) - 46
    data[at + 24 : at + 28] = (size & 0xFFFFFFFF).to_bytes(4, "little")
    path.write_bytes(data)
    return path


def deflated(path: Path) -> Path:
    return write_zip(path, whole(), zipfile.ZIP_DEFLATED)


def bad_crc(path: Path) -> Path:
    """The index's bytes are not those its checksum is of."""
    path.write_bytes(zip_bytes(whole()).replace(b"by-hand", b"by-hook", 1))
    return path


def other_local_name(path: Path) -> Path:
    """Another name in front of the member's bytes than in the directory of the archive."""
    data = zip_bytes(whole())
    path.write_bytes(data.replace(b"weights/", b"../../x/", 1))
    return path


def encrypted(path: Path) -> Path:
    """Says that the index is encrypted."""
    data = bytearray(zip_bytes(whole()))
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + flags] |= 1
    path.write_bytes(data)
    return path


def overlapping(path: Path) -> Path:
    """Two members of which the second's bytes are the first's again."""
    data = bytearray(zip_bytes(whole()))
    starts = [at for at in range(len(data)) if data[at : at + 4] == b"PK\x01\x02"]
    data[starts[2] + 42 : starts[2] + 46] = data[starts[1] + 42 : starts[1] + 46]
    path.write_bytes(data)
    return path


def without(name: str) -> Callable[[Path], Path]:
    return lambda path: write_zip(path, whole(**{next(member for member in whole() if name in member): None}))


A38: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "parent": (lambda p: archive_of(p, plain("../evil")), "../evil: would be written outside of its folder"),
    "deep-parent": (lambda p: archive_of(p, plain("artifacts/../../evil")), "artifacts/../../evil: would be written"),
    "absolute": (lambda p: archive_of(p, plain("/var/evil")), "/var/evil: would be written outside"),
    "backslash": (lambda p: archive_of(p, plain("..\\evil")), "..\\evil: would be written outside"),
    "symlink": (
        lambda p: archive_of(p, plain("link", b"/etc/passwd", external_attr=(stat.S_IFLNK | 0o777) << 16)),
        "link: is not a plain file",
    ),
    "device": (
        lambda p: archive_of(p, plain("disk", external_attr=(stat.S_IFBLK | 0o777) << 16)),
        "disk: is not a plain file",
    ),
    "folder": (lambda p: archive_of(p, plain("artifacts/", b"")), "artifacts/: is not a plain file"),
    "twice": (lambda p: archive_of(p, plain(min(members()))), f"{min(members())}: is in the archive twice"),
    "two-indexes": (lambda p: archive_of(p, plain("index.json")), "index.json: is in the archive twice"),
    "stray": (lambda p: archive_of(p, plain("artifacts/extra.so")), "artifacts/extra.so: is not in the index"),
    "bomb": (bomb, "index.json: is compressed"),
    "deflated": (deflated, "index.json: is compressed"),
    "encrypted": (encrypted, "index.json: is encrypted"),
    "bad-crc": (bad_crc, "index.json: cannot be read"),
    "other-local-name": (other_local_name, "cannot be unpacked"),
    "overlapping": (overlapping, "artifacts/"),
    "absent-library": (without("artifacts/"), "artifacts/"),
    "absent-weights": (without("weights/"), "weights/"),
    "index-of-another-size": (
        lambda p: write_zip(p, whole(**{next(m for m in members() if "weights" in m): b"short"})),
        "weights/",
    ),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("what", A38)
def test_a38_a_hostile_archive_is_refused_before_anything_is_written(what: str, tmp_path: Path, cache: Path) -> None:
    make, words = A38[what]
    archive = make(tmp_path / "evil.aotpack")
    before = sorted(path for path in tmp_path.rglob("*") if cache not in path.parents and path != cache)
    with pytest.raises(BundleError) as caught:
        open_bundle(archive)
    assert words in caught.value.message
    assert "\n" not in str(caught.value)
    assert unpacked(cache) == []
    assert sorted(path for path in tmp_path.rglob("*") if cache not in path.parents and path != cache) == before
    assert not Path("/var/evil").exists()


def test_an_archive_cut_at_any_byte_is_refused(tmp_path: Path, cache: Path) -> None:
    whole_archive = zip_bytes(whole())
    place = tmp_path / "cut.aotpack"
    for length in [
        *range(40),
        *range(40, len(whole_archive) - 60, 97),
        *range(len(whole_archive) - 60, len(whole_archive)),
    ]:
        place.write_bytes(whole_archive[:length])
        with pytest.raises(BundleError):
            open_bundle(place)
    assert unpacked(cache) == []


def test_an_archive_with_any_byte_changed_is_refused_or_says_the_same(tmp_path: Path, cache: Path) -> None:
    """Never another exception, and never other bytes than the index promises. One byte in 13."""
    good = zip_bytes(whole())
    place = tmp_path / "changed.aotpack"
    accepted = 0
    for position in range(0, len(good), 13):
        changed = bytearray(good)
        changed[position] ^= 0xFF
        place.write_bytes(changed)
        try:
            bundle = open_bundle(place)
            bundle.verify()
            bundle.close()
        except BundleError:
            continue
        accepted += 1
    assert accepted < len(good) // 13, "nothing was refused"


# ------------------------------------------------------------------------------------- hostile indexes


def change(path: str, value: Json) -> Callable[[Json], None]:
    """Set the value at `entries.encoder.variants.0.id` of an index."""
    steps = [int(step) if step.isdigit() else step for step in path.split(".")]

    def apply(index: Json) -> None:
        for step in steps[:-1]:
            index = index[step]
        index[steps[-1]] = value

    return apply


def drop(path: str) -> Callable[[Json], None]:
    owner, _, last = path.rpartition(".")

    def apply(index: Json) -> None:
        for step in owner.split(".") if owner else ():
            index = index[int(step) if step.isdigit() else step]
        del index[last]

    return apply


ENTRY = "entries.encoder"
VARIANT = "entries.encoder.variants.0"
GUARD = f"{VARIANT}.guards.leaves.0"

TEXTS: Mapping[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "spaces": (b" \n", "is empty"),
    "half": (json.dumps(index_record()).encode()[:500], "is not the JSON of an index"),
    "pickle": (pickle.dumps({"format": 1}), "is not the JSON of an index"),
    "latin-1": ('{"format": 1, "name": "\xff"}'.encode("latin-1"), "is not the JSON of an index"),
    "list": (b"[]", "has no 'format'"),
    "number": (b"1", "has no 'format'"),
    "no-format": (b'{"entries": {}}', "has no 'format'"),
    "nothing-else": (b'{"format": 1}', "index: missing key 'bundle'"),
    "nan": (json.dumps(index_record() | {"settings": {"x": float("nan")}}).encode(), "NaN is not JSON"),
    "infinity": (json.dumps(index_record() | {"settings": {"x": float("-inf")}}).encode(), "-Infinity is not JSON"),
    "key-twice": (b'{"format": 1, "format": 1}', "key 'format' is given twice"),
    "deep-key-twice": (
        json.dumps(index_record()).encode().replace(b'"tier"', b'"id": "x", "tier"', 1),
        "key 'id' is given twice",
    ),
    "deep-lists": (b'{"format": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is not the JSON of an index"),
    "deep-dicts": (b'{"format": 1, "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001, "is not the JSON of an index"),
    "endless-number": (b'{"format": ' + b"9" * 100_000 + b"}", "is not the JSON of an index"),
    "trailing": (json.dumps(index_record()).encode() + b"{}", "is not the JSON of an index"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_text_that_is_no_index_is_refused(what: str, tmp_path: Path) -> None:
    data, words = TEXTS[what]
    with pytest.raises(MalformedBundle) as caught:
        open_bundle(write_bundle(tmp_path / "b", data))
    assert caught.value.message.startswith(f"index.json: {words}") or words in caught.value.message
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [0, 4, 99, -1, 1.0, 2.0, "1", True, None, [1], {"v": 1}], ids=repr)
def test_another_format_version_is_named_with_those_that_are_read(version: Json, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat) as caught:
        open_bundle(write_bundle(tmp_path / "b", index_record() | {"format": version}))
    assert caught.value.found == version
    assert caught.value.exit_code == 6
    assert caught.value.message.endswith("this aotpack-runtime reads 1, 2, 3")


@pytest.mark.parametrize("version", [1, 2])
def test_each_format_version_of_the_ledger_is_read(version: int, tmp_path: Path) -> None:
    bundle = open_bundle(write_bundle(tmp_path / "b", index_record() | {"format": version}))
    assert list(bundle.index.entries) == ["encoder"]
    bundle.close()


RECORDS: Mapping[str, tuple[Callable[[Json], object], str]] = {
    # what must be there, and of its kind
    "no-entries": (drop("entries"), "missing key 'entries'"),
    "no-weights": (drop("weights"), "missing key 'weights'"),
    "no-guards": (drop(f"{VARIANT}.guards"), "entries.encoder.variants[0]: missing key 'guards'"),
    "entries-a-list": (change("entries", []), "index: "),
    "entry-a-number": (change(ENTRY, 3), "entries.encoder"),
    "variants-a-number": (change(f"{ENTRY}.variants", 3), "entries.encoder"),
    "id-a-number": (change(f"{VARIANT}.id", 3), "entries.encoder.variants[0]: expected text, got '3'"),
    "needs-a-number": (change(f"{VARIANT}.target.needs", {"torch": 2.13}), "expected text"),
    "tier": (change(f"{VARIANT}.tier", "boiling"), "unknown tier 'boiling'"),
    "policy": (change(f"{ENTRY}.on_miss", {"policy": ["eager"]}), "entries.encoder"),
    "operators": (change(f"{ENTRY}.operators", {"a::b": 3}), "entries.encoder: expected text"),
    "labels": (change("bundle.labels", "no"), "index: "),
    # parameters become text that is compiled
    "name-with-code": (change(f"{ENTRY}.parameters.0.name", "x=__import__('os').system('true')"), "is not a Python name"),
    "name-with-space": (change(f"{ENTRY}.parameters.0.name", "x y"), "'x y' is not a Python name"),
    "name-a-keyword": (change(f"{ENTRY}.parameters.0.name", "import"), "'import' is not a Python name"),
    "name-empty": (change(f"{ENTRY}.parameters.0.name", ""), "'' is not a Python name"),
    "name-a-number": (change(f"{ENTRY}.parameters.0.name", 3), "expected text"),
    "kind": (change(f"{ENTRY}.parameters.0.kind", "maybe"), "unknown kind 'maybe'"),
    "name-twice": (
        change(f"{ENTRY}.parameters", [{"name": "x", "kind": "keyword_only"}] * 2), "entries.encoder: duplicate parameter name",
    ),
    "order": (
        change(f"{ENTRY}.parameters", [{"name": "x", "kind": "var_keyword"}, {"name": "y", "kind": "keyword_only"}]),
        "entries.encoder: wrong parameter order",
    ),
    "default-class": (
        change(f"{ENTRY}.parameters.0.default", {"tree": ["class", "os:system", ["a"], "*"], "leaves": [1]}), "default",
    ),
    "default-count": (change(f"{ENTRY}.parameters.0.default", {"tree": ["tuple", "*", "*"], "leaves": [1]}), "default"),
    "default-list": (change(f"{ENTRY}.parameters.0.default", {"tree": "*", "leaves": [[1]]}), "not a scalar"),
    # files
    "digest-escapes": (change(f"{VARIANT}.artifact.digest", "../../../etc"), "'../../../etc' is not a sha256"),
    "digest-upper": (change(f"{VARIANT}.artifact.digest", "A" * 64), "is not a sha256"),
    "digest-newline": (change(f"{VARIANT}.artifact.digest", "a" * 64 + "\n"), "is not a sha256"),
    "file-escapes": (change(f"{VARIANT}.artifact.files", {"../x.so": {"sha256": "a" * 64, "bytes": 1}}), "is not a plain file name"),
    "file-absolute": (change(f"{VARIANT}.artifact.files", {"/x.so": {"sha256": "a" * 64, "bytes": 1}}), "is not a plain file name"),
    "file-dots": (change(f"{VARIANT}.artifact.files", {"..": {"sha256": "a" * 64, "bytes": 1}}), "is not a plain file name"),
    "file-hidden": (change(f"{VARIANT}.artifact.files", {".x": {"sha256": "a" * 64, "bytes": 1}}), "is not a plain file name"),
    "file-nul": (change(f"{VARIANT}.artifact.files", {"x\0.so": {"sha256": "a" * 64, "bytes": 1}}), "is not a plain file name"),
    "weights-escape": (change("weights.file.sha256", "../../etc/passwd"), "is not a sha256"),
    "size-negative": (change(f"{VARIANT}.artifact.files.model.so", None), ""),
    "size-huge-float": (change("weights.file.bytes", 1e30), "expected a size"),
    "size-bool": (change("weights.file.bytes", True), "expected a size"),
    "size-minus": (change("weights.file.bytes", -1), "expected a size, got -1"),
    "one-member-twice": (
        lambda index: index["entries"]["encoder"]["variants"].append(
            {**variant_record("other", "aoti", 3, LIBRARY), "artifact": {
                **variant_record("other", "aoti", 3, LIBRARY)["artifact"],
                "files": {"model.so": {"sha256": "b" * 64, "bytes": 5}}}}),
        "artifacts/",
    ),
    "program-without-file": (change(f"{ENTRY}.programs.0.artifact.files", {}), "encoder/program0: an exported program is one file"),
    # guards and outputs
    "id-twice": (
        lambda index: index["entries"]["encoder"]["variants"].append(variant_record("encoder/batch2/cpu", "aoti", 3, LIBRARY)),
        "two variants have the id 'encoder/batch2/cpu'",
    ),
    "size-text": (change(f"{GUARD}.dims", ["2", 4]), "not a size or range"),
    "size-below-zero": (change(f"{GUARD}.dims", [-2, 4]), "not a size or range: -2"),
    "range-below-zero": (change(f"{GUARD}.dims", [[-2, 4], 4]), "not a size or range: [-2, 4]"),
    "size-flag": (change(f"{GUARD}.dims", [True, 4]), "not a size or range: True"),
    "size-infinite": (change(f"{GUARD}.dims", [1e400, 4]), "is not"),
    "trees-too-many": (change(f"{VARIANT}.guards.trees", ["*", "*"]), "entries.encoder.variants[0]"),
    "leaves-too-few": (change(f"{VARIANT}.guards.leaves", []), "entries.encoder.variants[0]"),
    "tree-deep": (change(f"{VARIANT}.guards.trees", [json.loads('["list",' * 80 + '"*"' + "]" * 80)]), "not a tree"),
    "tree-unhashable-key": (change(f"{VARIANT}.guards.trees", [["dict", [["a"]], "*"]]), "not a tree"),
    "tree-unknown": (change(f"{VARIANT}.guards.trees", [["set", "*"]]), "unknown container 'set'"),
    "where-code": (change(f"{VARIANT}.guards.where", ["__import__('os').system('true')"]), "is not allowed in an expression"),
    "where-lambda": (change(f"{VARIANT}.guards.where", ["(lambda: 0)()"]), "is not allowed in an expression"),
    "where-power": (change(f"{VARIANT}.guards.where", ["9**9**9"]), "is not allowed in an expression"),
    "where-shift": (change(f"{VARIANT}.guards.where", ["1 << 99999"]), "is not allowed in an expression"),
    "where-long": (change(f"{VARIANT}.guards.where", ["1+" * 5000 + "1"]), "expression of 10001 characters"),
    "where-deep": (change(f"{VARIANT}.guards.where", ["1+" * 400 + "1"]), "is nested too deeply"),
    "where-deep-minus": (change(f"{VARIANT}.guards.where", ["-" * 2000 + "1"]), "is nested too deeply"),
    "where-parentheses": (change(f"{VARIANT}.guards.where", ["(" * 2000 + "1" + ")" * 2000]), "is not an expression"),
    "where-unknown-name": (change(f"{VARIANT}.guards.where", ["y.shape[0] == 2"]), "'y.shape[0]'"),
    "strides-unknown-name": (change(f"{GUARD}.layout", ["n", "1"]), "'n'"),
    "strides-too-few": (change(f"{GUARD}.layout", ["1"]), "x"),
    "layout-unknown": (change(f"{GUARD}.layout", "diagonal"), "unknown layout 'diagonal'"),
    "result-negative": (change(f"{VARIANT}.outputs.leaves.0.result", -1), "entries.encoder.variants[0]"),
    "argument-beyond": (change(f"{VARIANT}.outputs.leaves", [{"argument": 7}]), "entries.encoder.variants[0]"),
    "outputs-too-few": (change(f"{VARIANT}.outputs.leaves", []), "entries.encoder.variants[0]"),
    "outputs-too-many": (change(f"{VARIANT}.outputs.tree", ["tuple"]), "entries.encoder.variants[0]"),
    "outputs-class": (change(f"{VARIANT}.outputs.tree", ["class", "os:system", ["a"], "*"]), "entries.encoder.variants[0]"),
    "size-of-nothing": (change(f"{VARIANT}.outputs.leaves", [{"size": "z.shape[0]"}]), "'z.shape[0]'"),
    "examples-none": (change(f"{VARIANT}.examples", []), "entries.encoder.variants[0]"),
    "examples-short": (change(f"{VARIANT}.examples", [[]]), "entries.encoder.variants[0]"),
    "examples-other-rank": (change(f"{VARIANT}.examples", [[[2]]]), "entries.encoder.variants[0]"),
    "examples-text": (change(f"{VARIANT}.examples", [["2x4"]]), "entries.encoder.variants[0]"),
    # weights
    "constant-without-weight": (change(f"{VARIANT}.constants", [["c0", "offset"]]), "needs the weight 'offset'"),
    "set-that-is-not-there": (change(f"{VARIANT}.weights", "decoder"), "names the weight set 'decoder'"),
    "no-weights-file": (change("weights.file", None), "no weights file"),
    "state-that-is-not-there": (change("weights.sets.encoder.state", ["steps"]), "'steps'"),
    "order-no-permutation": (change("weights.sets.encoder.weights.scale.order", [0, 0]), "order"),
    "order-text": (change("weights.sets.encoder.weights.scale.order", "01"), "order"),
}  # fmt: skip
RECORDS["size-negative"] = (  # type: ignore[index]
    lambda index: index["entries"]["encoder"]["variants"][0]["artifact"]["files"]["model.so"].update(bytes=-5),
    "expected a size, got -5",
)


@pytest.mark.parametrize("what", RECORDS)
def test_an_index_that_cannot_be_meant_is_refused_with_the_place(what: str, tmp_path: Path) -> None:
    mutate, words = RECORDS[what]
    index = index_record()
    mutate(index)
    with pytest.raises(MalformedBundle) as caught:
        open_bundle(write_bundle(tmp_path / "b", index))
    assert caught.value.message.startswith("index.json: ")
    assert words in caught.value.message
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        pytest.param(change(f"{VARIANT}.artifact.kind", "wasm"), "is a 'wasm' artifact, which this aotpack-runtime cannot load", id="kind"),
        pytest.param(change(f"{VARIANT}.target.needs", {"quantum": "2"}), "needs quantum '2', which this aotpack-runtime cannot judge", id="need"),
        pytest.param(change(f"{VARIANT}.target.device", "tpu"), "no TPU device", id="device"),
    ],
)  # fmt: skip
def test_what_a_newer_builder_may_know_is_skipped_with_a_reason(
    mutate: Callable[[Json], object], reason: str, tmp_path: Path
) -> None:
    """A bundle is an advisory artifact: the variant is left out, the bundle is served."""
    index = index_record()
    mutate(index)
    session = session_of(write_bundle(tmp_path / "b", index))
    assert session.skipped == {"encoder/batch2/cpu": reason}
    assert "encoder/batch2/cpu" not in [variant.id for variant in session["encoder"].variants]


@pytest.mark.parametrize("policy", ["jit", "eager", "error", "invented-later"])
def test_an_unknown_policy_is_served_as_eager(policy: str, tmp_path: Path) -> None:
    index = index_record()
    index["entries"]["encoder"]["on_miss"] = {"policy": policy}
    session = load(write_bundle(tmp_path / "b", index), machine=Host(), source="never")
    assert session["encoder"].policy == ("eager" if policy == "invented-later" else policy)


@pytest.mark.parametrize(
    "name", ["_memo", "_slow", "_key", "_serve", "_PLAIN", "_leaf_key", "_grad", "_default_0", "self", "é"]
)
def test_any_other_python_name_is_a_parameter(name: str, tmp_path: Path) -> None:
    """Names inside the function that is compiled for an entry never meet those of the model."""
    index = index_record()
    entry = index["entries"]["encoder"]
    entry["parameters"] = [{"name": "first", "kind": "positional_or_keyword", "default": {"tree": "*", "leaves": [7]}},
                           {"name": name, "kind": "keyword_only"}]  # fmt: skip
    for variant in (*entry["variants"], *entry["programs"]):
        variant["guards"] = {
            "trees": ["*", "*"],
            "leaves": [{"path": "first", "value": 7}, {"path": name, "value": 8}],
            "where": [],
        }
        variant["outputs"] = {"tree": "*", "leaves": [{"value": 1}]}
        variant["examples"] = [[None, None]]
    encoder = session_of(write_bundle(tmp_path / "b", index))["encoder"]
    assert str(encoder.explain(**{name: 8})) == "hit: encoder/batch2/cpu"
    assert "expected 8, got 9" in str(encoder.explain(7, **{name: 9}))
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        encoder.explain(other=1)


def test_every_field_of_an_index_may_be_garbage(tmp_path: Path) -> None:
    """Each value in turn replaced by each kind of thing: an index is read, or refused as one of our errors."""
    garbage: list[Json] = [None, True, -1, 1.5, 10**30, "", "x", "\ud800", [], [None], {}, {"a": 1}]
    refused: list[str] = []
    for path in list(_paths(index_record())):
        for value in garbage:
            index = index_record()
            _put(index, path, value)
            try:
                index_json.parse(json.dumps(index).encode())
            except BundleError as error:
                refused.append(str(error))
    assert len(refused) > 300
    assert [message for message in refused if "\n" in message] == []


def test_what_is_read_of_garbage_can_be_opened_judged_and_explained(tmp_path: Path) -> None:
    """An index that is read is whole: the session opens, judges and explains without an error that is not ours."""
    garbage: list[Json] = [None, -1, "x", [], {"a": 1}]
    bundle = write_bundle(tmp_path / "b")
    opened = 0
    for path in list(_paths(index_record())):
        for value in garbage:
            index = index_record()
            _put(index, path, value)
            (bundle / "index.json").write_text(json.dumps(index))
            try:
                with session_of(bundle) as session:
                    session.status()
                    for entry in session:
                        str(session[entry].explain(*[1] * len(session[entry].record.parameters)))
            except AotpackError:
                continue
            except TypeError as error:
                if "argument" not in str(error):
                    raise
                continue
            opened += 1
    assert opened > 30


def _paths(value: Json, at: tuple[str | int, ...] = ()) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from _paths(item, (*at, key))


def _put(index: Json, path: tuple[str | int, ...], value: Json) -> None:
    for step in path[:-1]:
        index = index[step]
    index[path[-1]] = value


# ------------------------------------------------------------------------------------- members


KINDS = {"library": "artifacts", "program": "programs", "weights": "weights"}


def member_of(kind: str) -> str:
    return next(member for member in members() if member.startswith(KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, -1], ids=["first-byte", "last-byte"])
def test_a_changed_byte_is_found_before_the_member_is_used(kind: str, position: int, tmp_path: Path) -> None:
    member = member_of(kind)
    data = bytearray(members()[member])
    data[position] ^= 1
    bundle = open_bundle(write_bundle(tmp_path / "b", files={**members(), member: bytes(data)}))
    use: Callable[[], object] = bundle.weights if kind == "weights" else lambda: bundle.path(member)
    for _ in range(2):
        with pytest.raises(DigestMismatch) as caught:
            use()
        assert (caught.value.member, caught.value.actual) == (member, sha256(bytes(data)))
    with pytest.raises(DigestMismatch, match=member):
        bundle.verify()


@pytest.mark.parametrize("check", ["full", "index"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_of_another_size_is_found_without_hashing(kind: str, check: Any, tmp_path: Path) -> None:
    member = member_of(kind)
    files = {**members(), member: members()[member] + b"more"}
    bundle = open_bundle(write_bundle(tmp_path / "b", files=files), check=check)
    with pytest.raises(
        MalformedBundle, match=f"has {len(files[member])} bytes, the index says {len(members()[member])}"
    ):
        bundle.path(member)


def test_what_check_turns_off_is_what_it_says(tmp_path: Path) -> None:
    """`index` compares sizes only and `off` nothing: for a disk that is trusted. `verify` hashes all the same."""
    member = member_of("library")
    folder = write_bundle(tmp_path / "b", files={**members(), member: bytes(len(LIBRARY))})
    for check in ("index", "off"):
        bundle = open_bundle(folder, check=check)
        assert bundle.path(member)
        with pytest.raises(DigestMismatch):
            bundle.verify()
    with pytest.raises(BundleError, match="check is 'loud'; expected full, index or off"):
        open_bundle(folder, check="loud")  # type: ignore[arg-type]


def missing(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("make", [missing, folder, fifo, endless, loop], ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", [*KINDS, "index"])
def test_a_member_that_is_no_file_is_refused_at_once(kind: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    """A pipe in the place of a file would be waited for without end."""
    bundle = write_bundle(tmp_path / "b")
    member = "index.json" if kind == "index" else member_of(kind)
    make(bundle / member)
    ended = threading.Event()

    def use() -> None:
        with pytest.raises(BundleError, match=member):
            open_bundle(bundle)
        ended.set()

    threading.Thread(target=use, daemon=True).start()
    assert ended.wait(20), "it waits"


def test_a_refused_bundle_leaves_no_file_open(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    (bundle / member_of("weights")).unlink()
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        with pytest.raises(MalformedBundle):
            open_bundle(bundle)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_dropped_session_gives_its_files_back(tmp_path: Path) -> None:
    """A20: whether it was closed or only forgotten."""
    bundle = write_bundle(tmp_path / "b")
    gc.collect()  # what tests before this one left behind
    before = len(os.listdir("/proc/self/fd"))
    for close in (True, False):
        for _ in range(20):
            session = session_of(bundle)
            if close:
                session.close()
            del session
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------------- weights files


def weights_bundle(folder: Path, data: bytes) -> Path:
    """A bundle whose weights file is `data`, as its index agrees."""
    index = index_record()
    index["weights"]["file"] = {"sha256": sha256(data), "bytes": len(data)}
    files = {member: content for member, content in members().items() if not member.startswith("weights/")}
    return write_bundle(folder, index, {**files, f"weights/{sha256(data)}.safetensors": data})


def header(text: str | bytes, data: bytes = bytes(16)) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return len(raw).to_bytes(8, "little") + raw + data


def tensor(**changed: Json) -> bytes:
    return header(json.dumps({"scale": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changed}}))


HEADERS: Mapping[str, bytes] = {
    "empty": b"",
    "seven-bytes": bytes(7),
    "length-beyond-the-file": (1 << 20).to_bytes(8, "little") + bytes(100),
    "length-of-all-memory": (0xFFFFFFFFFFFFFFFF).to_bytes(8, "little") + bytes(100),
    "pickle": pickle.dumps({"scale": [0.0] * 4}),
    "zip": zip_bytes({"archive/data.pkl": b"x"}),
    "no-json": header("{"),
    "a-list": header("[]"),
    "a-number": header("7"),
    "not-utf-8": header(b'{"\xff": 1}'),
    "nested": header("[" * 50_000 + "]" * 50_000),
    "tensor-a-list": header('{"scale": []}'),
    "no-offsets": header('{"scale": {"dtype": "F32", "shape": [4]}}'),
    "dtype": tensor(dtype="F31"),
    "dtype-a-list": tensor(dtype=["F32"]),
    "shape-negative": tensor(shape=[-4]),
    "shape-two-negatives": tensor(shape=[-2, -2]),
    "shape-infinite": header('{"scale": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 16]}}'),
    "shape-too-large": tensor(shape=[5]),
    "shape-overflow": tensor(shape=[2**62, 4]),
    "offsets-outside": tensor(data_offsets=[0, 17]),
    "offsets-backwards": tensor(data_offsets=[16, 0]),
    "offsets-negative": tensor(data_offsets=[-16, 0]),
    "offsets-text": tensor(data_offsets=["0", "16"]),
    "offsets-float": tensor(data_offsets=[0.0, 16.0]),
    "offsets-three": tensor(data_offsets=[0, 8, 16]),
    "name-twice": header('{"scale": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "scale": {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}'),
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_a_weights_file_that_lies_is_refused_whole(what: str, tmp_path: Path) -> None:
    bundle = open_bundle(weights_bundle(tmp_path / "b", HEADERS[what]))
    with pytest.raises(MalformedBundle) as caught:
        bundle.weights()
    assert caught.value.member.startswith("weights/")
    assert "\n" not in str(caught.value)


def test_a_weight_that_its_file_lacks_is_named(tmp_path: Path) -> None:
    bundle = open_bundle(weights_bundle(tmp_path / "b", header("{}")))
    with pytest.raises(MalformedBundle, match="holds no tensor 'scale'"):
        bundle.weights()["scale"]


# ------------------------------------------------------------------------------------- where archives unpack


def test_an_archive_unpacks_once_and_under_the_cache_only(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "tmp")
    archive = pack_archive(write_bundle(tmp_path / "b"), tmp_path / "b.aotpack")
    roots = set()
    for _ in range(3):
        bundle = open_bundle(archive)
        roots.add(bundle.root)
        bundle.close()
    (place,) = [path for path in (cache / "unpacked").iterdir() if not path.name.startswith(".")]
    assert roots == {place}
    assert place.name == sha256(archive.read_bytes())
    assert os.listdir(tmp_path / "tmp") == []


def test_an_unpacked_folder_that_lost_a_file_is_unpacked_again(tmp_path: Path) -> None:
    """What cleans temporary folders by age takes single files."""
    archive = pack_archive(write_bundle(tmp_path / "b"), tmp_path / "b.aotpack")
    bundle = open_bundle(archive)
    bundle.close()
    (bundle.root / member_of("library")).unlink()
    again = open_bundle(archive)
    again.verify()
    again.close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722], ids=oct)
def test_a38_a_cache_that_others_can_write_is_not_used(
    mode: int, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies there could be anybody's; a private folder is taken instead, with a warning."""
    archive = pack_archive(write_bundle(tmp_path / "b"), tmp_path / "b.aotpack")
    planted = cache / "unpacked" / sha256(archive.read_bytes())
    write_bundle(planted, index_record() | {"bundle": {"name": "planted", "version": "1.0.0", "labels": {}}})
    (cache / "unpacked").chmod(mode)
    bundle = open_bundle(archive)
    assert bundle.index.name == "by-hand"
    assert cache not in bundle.root.parents
    assert stat.S_IMODE(bundle.root.parent.stat().st_mode) == 0o700
    assert f"{cache / 'unpacked'}: others can write it" in caplog.text


def test_a_cache_that_cannot_be_made_is_replaced(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    archive = pack_archive(write_bundle(tmp_path / "b"), tmp_path / "b.aotpack")
    bundle = open_bundle(archive)
    bundle.verify()
    assert tmp_path / "tmp" in bundle.root.parents
    assert "AOTPACK_CACHE_DIR" in caplog.text


def test_a38_the_current_folder_is_never_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that would mean it, because they are empty or relative, are passed over."""
    from aotpack_runtime.machine import cache_dir

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AOTPACK_CACHE_DIR")
    for variables in (
        {"XDG_CACHE_HOME": "cache"},
        {"XDG_CACHE_HOME": "."},
        {"XDG_CACHE_HOME": "", "HOME": ""},
        {"HOME": "."},
    ):
        with monkeypatch.context() as patch:
            patch.delenv("XDG_CACHE_HOME", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            assert cache_dir().is_absolute()
            assert cache_dir().resolve() != tmp_path / "cache" / "aotpack"


def test_sessions_from_one_archive_share_one_unpacked_folder_and_outlive_it(tmp_path: Path, cache: Path) -> None:
    """A20: delete the unpacked folder, and the archive, while it is open."""
    archive = pack_archive(write_bundle(tmp_path / "b"), tmp_path / "b.aotpack")
    bundle = open_bundle(archive)
    archive.unlink()
    shutil.rmtree(cache)
    bundle.verify()
    for member, data in members().items():
        assert Path(bundle.path(member)).read_bytes() == data


def test_an_index_is_what_was_read_even_when_the_file_changes(tmp_path: Path) -> None:
    """The index, its digest and every member are of one moment: what replaces the folder later is not seen."""
    folder = write_bundle(tmp_path / "b")
    bundle = open_bundle(folder)
    shutil.rmtree(folder)
    write_bundle(folder, index_record() | {"settings": {"changed": 1}}, dict.fromkeys(members(), b"other"))
    bundle.verify()
    assert bundle.index.settings == {}


def test_the_hosts_of_these_tests_have_the_facts_of_a_machine() -> None:
    """A fake that is not like the real thing would test itself."""
    from aotpack_runtime.machine import this_machine

    assert all(hasattr(this_machine(), field.name) for field in dataclasses.fields(Host))
