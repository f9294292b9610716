"""An Index as the one JSON that it is written to and read from.

FORMAT_VERSION ledger
    1  2026-11  first version: kinds aoti and exported
    2  2026-11  adds entries of kernels: kinds cubin and ptx, Variant.axes and .launch, Entry.kernel; what many variants
                have in common stands once, under `shared`; reads 1
    3  2026-11  adds torch entries on CUDA: WeightRef.host, and the need `cuda`; Variant.recipe of programs: what a miss
                compiles from a bundle alone; Kernel.recipe, the same for kernels; guards and launches of kernels stand
                under `shared` too; reads 1 and 2, without them
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from aotpack_runtime.errors import MalformedBundle, UnsupportedFormat
from aotpack_runtime.format import layout
from aotpack_runtime.format.codec import no_duplicates
from aotpack_runtime.format.entry_json import dump_entry, parse_entry
from aotpack_runtime.format.fingerprint import canonical
from aotpack_runtime.format.index import Entry, Index, Variant
from aotpack_runtime.format.plain import dump_file, parse_file, text, texts
from aotpack_runtime.format.sound import check_kernel, check_members, check_parameters, check_variant, check_weights
from aotpack_runtime.format.variant_json import SHARED, SHARED_BY_KERNELS, Shared, parse_variant
from aotpack_runtime.format.weights_json import dump_set, parse_set

FORMAT_VERSION = 3
READS = (1, 2, 3)

Json = Any


# ------------------------------------------------------------------------------------------------------- writing


def dump(index: Index) -> bytes:
    """The bytes of index.json: one line, sorted keys, the same index gives the same bytes."""
    shared: dict[bytes, int] = {}
    entries = {name: dump_entry(entry) for name, entry in sorted(index.entries.items())}
    for entry in entries.values():
        for record in (*entry["variants"], *entry["programs"]):
            for field_name in SHARED_BY_KERNELS if "launch" in record else SHARED:
                record[field_name] = shared.setdefault(canonical(record[field_name]), len(shared))
    return canonical(
        {
            "format": FORMAT_VERSION,
            "bundle": {"name": index.name, "version": index.version, "labels": dict(index.labels)},
            "requires": dict(index.requires),
            "shared": [json.loads(value) for value in shared],
            "entries": entries,
            "weights": {
                "file": dump_file(index.weights_file) if index.weights_file else None,
                "sets": {name: dump_set(item) for name, item in index.weight_sets.items()},
            },
            "provenance": dict(index.provenance),
            "settings": dict(index.settings),
        }
    ) + b"\n"  # fmt: skip


# ------------------------------------------------------------------------------------------------------- reading


def parse(data: bytes, member: str = layout.INDEX) -> Index:
    """Read index.json; MalformedBundle or UnsupportedFormat with the place and what was found."""
    with _collector_at_rest():
        return _parse(data, member)


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Thousands of variants are hundreds of thousands of objects, all of them kept: looking through them for garbage
    again and again takes a third of the time, and looking through them once at the end still a fifth: so they are
    moved to the oldest generation as they are (unless somebody keeps frozen objects, which would move too). What is
    garbage before goes first, or it would move with them."""
    working = gc.isenabled()
    if working:
        gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if working:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _parse(data: bytes, member: str) -> Index:
    try:
        root = json.loads(data, object_pairs_hook=no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if not data.strip():
            raise MalformedBundle(member, "is empty") from None
        raise MalformedBundle(member, f"is not the JSON of an index: {error}") from None
    if not isinstance(root, dict) or "format" not in root:
        raise MalformedBundle(member, "has no 'format': this is not an aotpack index", hint="")
    if root["format"] not in READS or type(root["format"]) is not int:
        raise UnsupportedFormat(member, found=root["format"], reads=READS)

    def at(place: str, read: Callable[[Json], Any], value: Json) -> Any:
        try:
            return read(value)
        except MalformedBundle:
            raise
        except KeyError as error:
            raise MalformedBundle(member, f"{place}: missing key {error}") from None
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise MalformedBundle(member, " ".join(f"{place}: {error}".split())[:300]) from None

    shared = Shared(root.get("shared", []))

    def entry(name: str, value: Json) -> Entry:
        def variants(key: str) -> tuple[Variant, ...]:
            items = at(f"entries.{name}", lambda record: list(record[key]), value)
            return tuple(
                at(f"entries.{name}.{key}[{position}]", lambda one: parse_variant(one, shared), item)
                for position, item in enumerate(items)
            )

        made: Entry = at(f"entries.{name}", lambda record: parse_entry(name, record, variants), value)
        at(f"entries.{name}", check_parameters, made.parameters)
        at(f"entries.{name}.kernel", check_kernel, made)
        checked: set[Hashable] = set()
        for key, items in (("variants", made.variants), ("programs", made.programs)):
            for position, item in enumerate(items):
                at(
                    f"entries.{name}.{key}[{position}]",
                    lambda variant: check_variant(variant, made.parameters, checked),
                    item,
                )
        return made

    def whole(value: Json) -> Index:
        bundle, weights = value["bundle"], value["weights"]
        return Index(
            name=text(bundle["name"]),
            version=text(bundle["version"]),
            labels=texts(bundle["labels"]),
            requires=texts(value["requires"]),
            entries={name: entry(name, item) for name, item in value["entries"].items()},
            weights_file=None if weights["file"] is None else parse_file(weights["file"]),
            weight_sets={name: at(f"weights.sets.{name}", parse_set, item) for name, item in weights["sets"].items()},
            provenance=dict(value["provenance"]),
            settings=dict(value["settings"]),
        )

    index: Index = at("index", whole, root)
    at("entries", check_members, index)
    at("weights", check_weights, index)
    return index


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
