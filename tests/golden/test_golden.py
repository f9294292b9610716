"""Indexes as they were written by each version of the format: they are read for as long as `READS` says so.

A file is added when the format's number moves, and never changed afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotpack_runtime.format.index_json import FORMAT_VERSION, READS, dump, parse

HERE = Path(__file__).resolve().parent
INDEXES = sorted(HERE.glob("format-*/*.json"))


@pytest.mark.parametrize("path", INDEXES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_index_of_every_format_that_is_read_means_the_same_today(path: Path) -> None:
    data = path.read_bytes()
    index = parse(data)
    record = json.loads(data)
    assert f"format-{record['format']}" == path.parent.name
    assert sorted(index.entries) == sorted(record["entries"])
    for name, entry in index.entries.items():
        wanted = record["entries"][name]
        assert [variant.id for variant in entry.variants] == [variant["id"] for variant in wanted["variants"]]
        guards = [variant["guards"] for variant in wanted["variants"]]
        assert [len(variant.guards.leaves) for variant in entry.variants] == [
            len((record["shared"][one] if isinstance(one, int) else one)["leaves"]) for one in guards
        ]
        assert [variant.artifact.digest for variant in (*entry.variants, *entry.programs)] == [
            variant["artifact"]["digest"] for variant in (*wanted["variants"], *wanted["programs"])
        ]
    assert parse(dump(index)) == index


def test_every_format_that_is_read_has_an_index_here() -> None:
    assert {path.parent.name for path in INDEXES} == {f"format-{number}" for number in READS}
    assert max(READS) == FORMAT_VERSION
