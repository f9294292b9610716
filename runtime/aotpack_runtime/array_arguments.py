"""Calls with arrays: the key under which a judged one is remembered, and the function compiled for a signature.

Nothing around a call changes what it gives, as it may for torch's tensors: arrays carry no autograd, and neither
autocast nor modes of torch reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aotpack_runtime.arguments import leaf_key, signature_text
from aotpack_runtime.format.index import Parameter
from aotpack_runtime.format.tensor import Call, Leaf, Other, TensorMeta
from aotpack_runtime.format.tree import Tree
from aotpack_runtime.host_arrays import Given
from aotpack_runtime.imported import imported
from aotpack_runtime.record import replace

_PLAIN = frozenset({bool, int, str, type(None), float, complex})
_ARRAY_KEY = "{0}.__class__, {0}.dtype, {0}.shape, {0}.strides"


def describe_arrays(
    trees: tuple[Tree, ...],
    leaves: Sequence[object],
    given: Sequence[Given | None],
    shared: Sequence[int],
    device: str = "cpu",
) -> Call:
    """The call as guards see it; `shared` are the positions of arrays in whose memory another one lies, `device`
    ("cpu", "cuda:0") is where the entry runs."""
    return Call(
        trees,
        tuple(
            _there(found.meta, device, shared=position in shared) if found is not None else _scalar(leaf)
            for position, (leaf, found) in enumerate(zip(leaves, given, strict=True))
        ),
    )


def _there(meta: TensorMeta, device: str, *, shared: bool) -> TensorMeta:
    if device.startswith("cuda") and meta.device.startswith("cuda") and meta.device != device:
        return replace(meta, odd=meta.odd or f"is on {meta.device}, the session is for {device}")
    return replace(meta, shared=True) if shared else meta


def _scalar(leaf: Any) -> Leaf:
    kind = type(leaf)
    return leaf if kind in _PLAIN else Other(f"an instance of {kind.__module__}.{kind.__qualname__}")


def judged_key(
    trees: tuple[Tree, ...], leaves: Sequence[Any], given: Sequence[Given | None], shared: Sequence[int]
) -> tuple[object, ...] | None:
    """Equal for two calls only when every guard judges them alike; None for one that is never remembered."""
    try:
        key = (
            trees, tuple(shared),
            *[found.meta if found is not None else leaf_key(leaf) for leaf, found in zip(leaves, given, strict=True)],
        )  # fmt: skip
        hash(key)
    except Exception:
        return None
    return key


def compile_array_entry(
    parameters: tuple[Parameter, ...],
    leaf_kinds: Sequence[str] | None,
    *,
    memo: dict[object, Callable[..., object]],
    slow: Callable[[tuple[object, ...] | None, tuple[object, ...]], object],
    again: type[Exception],
) -> Callable[..., object]:
    """A function with the signature of `parameters` that answers judged calls from `memo` and asks `slow` otherwise,
    also where what serves raises `again`. As `arguments.compile_entry`, for arrays."""
    names = [parameter.name for parameter in parameters]
    scope: dict[str, Any] = {
        "__memo": memo, "__slow": slow, "__Error": Exception, "__again": again, "__leaf_key": leaf_key,
        "__mixed_key": _mixed_key,
    }  # fmt: skip
    signature = signature_text(parameters, scope)
    arguments = ", ".join(names) + ("," if len(names) == 1 else "")
    body = [f"    return __slow(None, ({arguments}))"]
    if leaf_kinds is not None and names:
        templates = {"tensor": _ARRAY_KEY, "scalar": "__leaf_key({0})", "mixed": "__mixed_key({0})"}
        key = ", ".join(templates[kind].format(name) for kind, name in zip(leaf_kinds, names, strict=True))
        body = [
            "    try:",
            f"        __key = ({key}{',' if len(names) == 1 else ''})",
            "        __serve = __memo.get(__key)",
            "    except __Error:",
            "        __key = __serve = None",
            "    if __serve is not None:",
            "        try:",
            f"            return __serve({', '.join(names)})",
            "        except __again:",
            "            pass",
            f"    return __slow(__key, ({arguments}))",
        ]
    exec(compile("\n".join([f"def forward({signature}):", *body]), "<aotpack entry>", "exec"), scope)  # noqa: S102 - as there
    function: Callable[..., object] = scope["forward"]
    return function


def _mixed_key(value: Any) -> object:
    return leaf_key(value) if type(value) in _PLAIN else (value.__class__, value.dtype, value.shape, value.strides)


def is_torch(leaves: Sequence[object]) -> bool:
    """Is a tensor of torch among them?"""
    torch = imported("torch")
    return torch is not None and any(isinstance(leaf, torch.Tensor) for leaf in leaves)
