"""The arguments of a kernel's call, read by functions that are compiled for the entry's signature.

`arguments` does the same for models, whose arguments may be containers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aotpack_runtime.format import index


class Quick(NamedTuple):
    """A call of foreign arrays: its key, what is packed, and the stream that an array names."""

    key: tuple[object, ...]
    packed: tuple[object, ...]
    stream: int | None


def compile_kernel(
    record: index.Entry,
    described: Sequence[bool],
    aligned: Sequence[tuple[bool, ...]],
    *,
    memo: dict[Any, Any],
    unseen: Callable[[Any], object],
    slow: Callable[[Any, tuple[object, ...]], object],
) -> Callable[..., object]:
    """A function with the entry's signature that answers judged calls of torch's tensors from `memo`, those with other
    numbers by what `unseen` makes of their key, and all else by `slow`.

    A key begins with the int arguments in their order. It holds all that guards and launches look at: of a tensor its
    dtype and device, and where a variant asks its alignment, or (of what is passed by descriptor) its address, shape
    and strides; of an int its value; of floats and bools their type. Its text holds parameter names that `format.index`
    checked, and nothing else from the bundle.
    """
    assert record.kernel is not None
    names, kinds = record.parameter_names, record.kernel.types
    may_be_complex = [
        any(getattr(variant.guards.leaves[place], "dtype", "") in ("any", "complex64", "complex128")
            for variant in record.variants)
        for place in range(len(names))
    ]  # fmt: skip
    first = [f"        __a{n} = {name}.data_ptr()" for n, (name, kind) in enumerate(zip(names, kinds, strict=True))
             if kind == "Tensor"]  # fmt: skip
    key = int_parameters(record)
    for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind == "Tensor":
            key.append(f"{name}.dtype, {name}.get_device(), {name}.is_neg()")
            key += [f"{name}.is_conj()"] if may_be_complex[place] else []
            key += [f"__a{place}, {name}.shape, {name}.stride()"] if described[place] else []
        else:
            key.append(f"{name}.__class__")
    key += _alignment_keys(described, aligned)
    # Address 0 is of an empty tensor, or of a class that has no memory of its own: that is judged each time.
    addresses = [f"__a{place}" for place, kind in enumerate(kinds) if kind == "Tensor"]
    there = f" if {' and '.join(addresses)} else None" if addresses else ""
    passed = [_passed(place, names[place], kind) for place, kind in enumerate(kinds)]
    arguments = ", ".join(names) + ("," if len(names) == 1 else "")
    text = "\n".join(
        [
            f"def launch({_signature(record)}):",
            "    try:",
            *first,
            f"        __key = ({', '.join(key)},)" if key else "        __key = ()",
            f"        __serve = __memo[__key]{there}",
            "    except __KeyError:",
            f"        __serve = __unseen(__key){there}",
            "    except __Error:  # no tensor of torch",
            "        __key = __serve = None",
            "    if __serve is None:",
            f"        return __slow(__key, ({arguments}))",
            f"    return __serve({', '.join(passed)})",
        ]
    )
    scope: dict[str, Any] = {
        "__memo": memo,
        "__unseen": unseen,
        "__slow": slow,
        "__KeyError": KeyError,
        "__Error": Exception,
    }
    exec(compile(text, "<aotpack kernel entry>", "exec"), scope)  # noqa: S102 - see the docstring
    function: Callable[..., object] = scope["launch"]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def compile_foreign(
    record: index.Entry, aligned: Sequence[tuple[bool, ...]]
) -> Callable[..., tuple[tuple[object, ...], tuple[object, ...], int | None]]:
    """A function that reads the arguments of a call of arrays with the CUDA array interface: its key, what is packed,
    and the stream that an array names. It raises for whatever else there is among them, which is then read one by one.

    The same of a key holds as in `compile_kernel`; all arrays are on the one GPU there is.
    """
    assert record.kernel is not None
    names, kinds = record.parameter_names, record.kernel.types
    lines, key, streams = [], [*int_parameters(record), "'array interface'"], []
    for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind != "Tensor":
            key.append(f"{name}.__class__")
            continue
        lines += [
            f"    __i{place} = {name}.__cuda_array_interface__",
            f"    __a{place} = __i{place}['data'][0]",
            f"    if not __a{place}: raise ValueError",
        ]
        key.append(
            f"{name}.__class__, __i{place}['typestr'], __i{place}.get('mask') is None, __i{place}['data'][1], "
            f"__a{place}.__class__, __a{place} >> 64, __i{place}.get('strides')"
        )
        streams.append(f"__i{place}.get('stream')")
    key += _alignment_keys([False] * len(names), aligned)
    passed = "".join(f"{_passed(place, names[place], kind)}, " for place, kind in enumerate(kinds))
    text = "\n".join(
        [
            f"def read({', '.join(names)}):",
            *lines,
            f"    return ({', '.join(key)},), ({passed}), {' or '.join(streams) or 'None'}",
        ]
    )
    scope: dict[str, Any] = {}
    exec(compile(text, "<aotpack kernel entry>", "exec"), scope)  # noqa: S102 - as in compile_kernel
    function: Callable[..., tuple[tuple[object, ...], tuple[object, ...], int | None]] = scope["read"]
    return function


def _passed(place: int, name: str, kind: str) -> str:
    """What is packed for an argument. A NumPy bool is no int to `struct`."""
    return f"__a{place}" if kind == "Tensor" else f"bool({name})" if kind == "bool" else name


def int_parameters(record: index.Entry) -> list[str]:
    """Names of the int parameters, with whose values keys begin."""
    assert record.kernel is not None
    pairs = zip(record.parameter_names, record.kernel.types, strict=True)
    return [name for name, kind in pairs if kind == "int"]


def _alignment_keys(described: Sequence[bool], aligned: Sequence[tuple[bool, ...]]) -> list[str]:
    """One test for all pointers that the same variants want aligned: the bits that any of their addresses has."""
    groups: dict[tuple[bool, ...], list[str]] = {}
    for place, wanted in enumerate(aligned):
        if any(wanted) and not described[place]:
            groups.setdefault(wanted, []).append(f"__a{place}")
    return [f"({' | '.join(addresses)}) & 15" for addresses in groups.values()]


def _signature(record: index.Entry) -> str:
    parts: list[str] = []
    for parameter in record.parameters:
        if parameter.kind == "keyword_only" and "*" not in parts:
            parts.append("*")
        parts.append(parameter.name)
    return ", ".join(parts)
