"""Guards: what a compiled variant relies on, as data; each can judge a call and say why not.

Sizes are written where they stand (`dims`), relations between them as expressions over `x.shape[0]` (`where`).
All of it is derived from the exported program: its range constraints, its placeholders and its shape guards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from aotpack_runtime.format.expression import Expression, variable
from aotpack_runtime.format.tensor import (
    ITEMSIZE_BYTES,
    Call,
    Leaf,
    Other,
    Scalar,
    TensorMeta,
    channels_last_strides,
    contiguous_strides,
    same_layout,
)
from aotpack_runtime.format.tree import Tree, describe_difference
from aotpack_runtime.record import Record

Layout = str | tuple[Expression, ...]
"""`contiguous`, `channels_last`, the exact stride of each dim, or `any` (of programs, which torch runs)."""


class Range(Record):
    """Sizes from `low` to `high`, both included; `high` None has no end."""

    low: int
    high: int | None

    def __contains__(self, size: int) -> bool:
        return self.low <= size and (self.high is None or size <= self.high)

    def __str__(self) -> str:
        return f"{self.low} or more" if self.high is None else f"{self.low}..{self.high}"

    def meet(self, other: Range) -> Range:
        """What both allow."""
        highs = [high for high in (self.high, other.high) if high is not None]
        return Range(max(self.low, other.low), min(highs) if highs else None)


Dim = int | Range

LARGEST_INT = 2**63 - 1
"""What compiled code and torch hold of an int that has no end of its own; a kernel's types say theirs."""


class TensorGuard(Record, kw_only=True):
    """A tensor argument: exact dtype and rank, device type, a size or range for each dim, its layout.

    A `written` one must not share memory with another, since the variant takes its reads and writes to be apart, and
    must be one that eager may write.
    """

    path: str
    dtype: str
    dims: tuple[Dim, ...]
    device: str
    layout: Layout = "contiguous"
    aligned: bool = False
    written: bool = False

    @property
    def static(self) -> bool:
        return all(isinstance(dim, int) for dim in self.dims)

    def reject(self, leaf: Leaf, env: dict[str, int]) -> str | None:
        """None when `leaf` fits, else one line; adds the sizes seen to `env`."""
        if not isinstance(leaf, TensorMeta):
            return f"{self.path}: expected a {self.dtype} tensor, got {describe(leaf)}"
        if leaf.odd:
            return f"{self.path} {leaf.odd}"
        if leaf.dtype != self.dtype:
            return f"{self.path}.dtype: expected {self.dtype}, got {leaf.dtype}"
        if len(leaf.shape) != len(self.dims):
            return f"{self.path}: expected {len(self.dims)} dims, got {len(leaf.shape)} {list(leaf.shape)}"
        if leaf.device.partition(":")[0] != self.device:
            return f"{self.path}.device: expected {self.device}, got {leaf.device}"
        if leaf.needs_grad:
            return f"{self.path} requires grad and grad mode is on; a compiled variant records no gradients"
        for axis, (dim, size) in enumerate(zip(self.dims, leaf.shape, strict=True)):
            env[variable(self.path, axis)] = size
            if size != dim if isinstance(dim, int) else size not in dim:
                return f"{self.path}.shape[{axis}]: expected {dim}, got {size}"
        if self.written and leaf.shared:
            return f"{self.path} shares memory with another argument; the variant writes it and takes them to be apart"
        if self.written and leaf.locked:
            return (
                f"{self.path} may not be written: it is a read-only array, a copy that DLPack gave, or an inference "
                "tensor outside of its mode"
            )
        if self.aligned and leaf.offset:
            return f"{self.path}: expected an address divisible by 16, got one {leaf.offset} bytes past it"
        return self._reject_layout(leaf, env)

    def _reject_layout(self, leaf: TensorMeta, env: dict[str, int]) -> str | None:
        match self.layout:
            case "any":
                return None
            case "contiguous":
                wanted = contiguous_strides(leaf.shape)
            case "channels_last":
                wanted = channels_last_strides(leaf.shape)
            case strides:
                wanted = tuple(stride(env) for stride in strides)  # type: ignore[operator]
        if same_layout(leaf.shape, leaf.strides, wanted):
            return None
        name = self.layout if isinstance(self.layout, str) else "exact"
        return f"{self.path}: expected {name} strides {list(wanted)}, got {list(leaf.strides)}"

    def words(self) -> str:
        shape = ", ".join(map(str, self.dims))
        layout = "" if self.layout == "contiguous" else f" {self.layout}"
        return f"{self.path}: {self.dtype}[{shape}] on {self.device}{layout}"


class ValueGuard(Record, kw_only=True):
    """A scalar frozen at build: its exact value and type. True is not 1, -0.0 is not 0.0, NaN equals itself."""

    path: str
    value: Scalar
    static = True

    def reject(self, leaf: Leaf, env: dict[str, int]) -> str | None:
        if isinstance(leaf, TensorMeta | Other) or identity(leaf) != identity(self.value):
            return f"{self.path}: expected {self.value!r}, got {describe(leaf)}"
        return None

    def words(self) -> str:
        return f"{self.path}: {self.value!r}"


class IntGuard(Record, kw_only=True):
    """An int argument that stays symbolic inside a range."""

    path: str
    dim: Range
    static = False

    def reject(self, leaf: Leaf, env: dict[str, int]) -> str | None:
        if type(leaf) is not int:
            return f"{self.path}: expected an int, got {describe(leaf)}"
        env[variable(self.path)] = leaf
        if leaf not in self.dim:
            return f"{self.path}: expected {self.dim}, got {describe(leaf)}"
        if self.dim.high is None and leaf > LARGEST_INT:
            return f"{self.path}: expected an int of 64 bits, got {describe(leaf)}"
        return None

    def words(self) -> str:
        return f"{self.path}: int {self.dim}"


class PointerGuard(Record, kw_only=True):
    """A tensor whose address a kernel is given: its dtype ("any" for void*), its device, perhaps its alignment. Shapes
    and strides are the caller's to pass, as numbers."""

    path: str
    dtype: str
    device: str
    aligned: bool = False
    static = False

    def reject(self, leaf: Leaf, env: dict[str, int]) -> str | None:
        if not isinstance(leaf, TensorMeta):
            return f"{self.path}: expected a {self.dtype} tensor, got {describe(leaf)}"
        if leaf.device.partition(":")[0] != self.device:
            return f"{self.path}.device: expected {self.device}, got {leaf.device}"
        if leaf.odd:
            return f"{self.path} {leaf.odd}"
        if self.dtype not in ("any", leaf.dtype):
            return f"{self.path}.dtype: expected {self.dtype}, got {leaf.dtype}"
        if self.aligned and leaf.offset:
            return f"{self.path}: expected an address divisible by 16, got one {leaf.offset} bytes past it"
        return None

    def words(self) -> str:
        return f"{self.path}: {self.dtype} pointer on {self.device}" + (" divisible by 16" if self.aligned else "")


class DescriptorGuard(Record, kw_only=True):
    """A tensor that is read through a descriptor (CUtensorMap): an address divisible by 16, the last dim contiguous,
    and the steps of the others divisible by 16 bytes (CUDA driver API, cuTensorMapEncodeTiled)."""

    path: str
    dtype: str
    device: str
    rank: int
    static = False

    def reject(self, leaf: Leaf, env: dict[str, int]) -> str | None:
        pointer = PointerGuard(path=self.path, dtype=self.dtype, device=self.device, aligned=True)
        reason = pointer.reject(leaf, env)
        if reason or not isinstance(leaf, TensorMeta):
            return reason
        if len(leaf.shape) != self.rank:
            return f"{self.path}: expected {self.rank} dims, got {len(leaf.shape)} {list(leaf.shape)}"
        if 0 in leaf.shape:
            return f"{self.path}: expected a tensor with elements, got the shape {list(leaf.shape)}"
        steps = [stride * ITEMSIZE_BYTES[self.dtype] for stride in leaf.strides]
        if leaf.strides[-1] != 1 or any(step % 16 or step <= 0 for step in steps[:-1]):
            wanted = "a contiguous last dim, and steps of the others divisible by 16 bytes"
            return f"{self.path}: expected {wanted}, got steps of {steps} bytes"
        return None

    def words(self) -> str:
        return f"{self.path}: {self.dtype} tensor of {self.rank} dims by descriptor on {self.device}"


class NumberGuard(Record, kw_only=True):
    """A float or bool argument whose value a kernel is given as it is."""

    path: str
    kind: str
    static = False

    def reject(self, leaf: Leaf, env: dict[str, int]) -> str | None:
        kinds = (float, int) if self.kind == "float" else (bool,)
        if type(leaf) in kinds:
            return None
        return f"{self.path}: expected a {self.kind}, got {describe(leaf)}"

    def words(self) -> str:
        return f"{self.path}: {self.kind}"


LeafGuard = TensorGuard | ValueGuard | IntGuard | PointerGuard | DescriptorGuard | NumberGuard


class Guards(Record):
    """Everything one variant relies on.

    `trees` gives the containers of each parameter, `leaves` one guard a leaf in order, `where` what must hold
    between sizes.
    """

    trees: tuple[Tree, ...]
    leaves: tuple[LeafGuard, ...]
    where: tuple[Expression, ...] = ()

    def reject(self, call: Call, parameters: tuple[str, ...]) -> str | None:
        """None when the call fits; otherwise the first reason against it."""
        return next(self._reasons(call, parameters), None)

    def _reasons(self, call: Call, parameters: tuple[str, ...]) -> Iterator[str]:
        yield from call.state
        if call.trees != self.trees:
            for name, wanted, found in zip(parameters, self.trees, call.trees, strict=True):
                difference = describe_difference(wanted, found, name)
                if difference:
                    yield difference
                    return
        env: dict[str, int] = {}
        for guard, leaf in zip(self.leaves, call.leaves, strict=True):
            reason = guard.reject(leaf, env)
            if reason:
                yield reason
                return
        for relation in self.where:
            reason = _reject_relation(relation, env)
            if reason:
                yield reason

    def env(self, call: Call) -> dict[str, int]:
        """Sizes and symbolic ints by name, of a call that fits."""
        env: dict[str, int] = {}
        for guard, leaf in zip(self.leaves, call.leaves, strict=True):
            guard.reject(leaf, env)
        return env

    @property
    def static(self) -> bool:
        """True when every size is fixed, so that shapes decide by equality alone."""
        return all(guard.static for guard in self.leaves)

    def words(self) -> list[str]:
        return [guard.words() for guard in self.leaves] + [relation.text for relation in self.where]


LONG_INT_BITS = 256


def identity(value: Scalar) -> tuple[object, ...]:
    """Equal exactly when two scalars have one type and one value, NaN and signed zeros included."""
    if type(value) is float:
        return float, value.hex()
    if type(value) is complex:
        return complex, value.real.hex(), value.imag.hex()
    return type(value), value


def describe(leaf: Leaf) -> str:
    """A leaf in a few words, for a reason."""
    if isinstance(leaf, TensorMeta):
        return f"a {leaf.dtype}{list(leaf.shape)} tensor"
    if isinstance(leaf, int) and leaf.bit_length() > LONG_INT_BITS:  # Python refuses to spell the longest
        return f"an int of {leaf.bit_length()} bits"
    return leaf.type_name if isinstance(leaf, Other) else repr(leaf)


_DIVISIBLE = r"(?P<size>\S+) % (?P<by>\d+) == 0"
_EQUAL = r"(?P<left>\S+) == (?P<right>\S+)"


def _reject_relation(relation: Expression, env: dict[str, int]) -> str | None:
    try:
        if relation(env):
            return None
    except ZeroDivisionError:
        return f"{relation} cannot be computed: a divisor is 0"
    if (match := re.fullmatch(_DIVISIBLE, relation.text)) and match["size"] in env:
        return f"{match['size']}: must be divisible by {match['by']}, got {env[match['size']]}"
    if (match := re.fullmatch(_EQUAL, relation.text)) and match["left"] in env and match["right"] in env:
        return f"{match['left']}: must equal {match['right']} = {env[match['right']]}, got {env[match['left']]}"
    seen = ", ".join(f"{name} = {env[name]}" for name in sorted(relation.names) if name in env)
    return f"{relation} does not hold: {seen}"
