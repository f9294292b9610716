"""Live arguments -> Call, and the short key under which a judged call is remembered.

A tensor is asked for numbers only (`shape`, `stride()`, `dtype`, `device`): torch is never imported here, only
looked up in `sys.modules` when the caller has imported it. What surrounds a call and changes eager's result
(autocast, dispatch modes, function transforms) is read the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from aotpack_runtime.format.index import Parameter
from aotpack_runtime.format.tensor import ALIGNMENT_BYTES, Call, Leaf, Other, TensorMeta
from aotpack_runtime.format.tree import LEAF, Tree, flatten

_PLAIN_SCALARS = frozenset({bool, int, str, type(None)})


def describe(trees: tuple[Tree, ...], leaves: Sequence[object], device: str) -> Call:
    """The call as guards see it; `device` ("cpu", "cuda:0") is where the entry runs."""
    torch = sys.modules.get("torch")
    return Call(trees, tuple(_describe(leaf, torch) for leaf in leaves), _state(torch, device))


def _describe(leaf: object, torch: Any) -> Leaf:
    kind = type(leaf)
    if kind in _PLAIN_SCALARS or kind is float or kind is complex:
        return leaf  # type: ignore[return-value]
    if torch is not None and isinstance(leaf, torch.Tensor):
        return _describe_tensor(leaf, torch)
    return Other(f"an instance of {kind.__module__}.{kind.__qualname__}")


def _describe_tensor(tensor: Any, torch: Any) -> TensorMeta:
    dtype = str(tensor.dtype).removeprefix("torch.")
    needs_grad = bool(tensor.requires_grad and torch.is_grad_enabled())
    odd = _odd(tensor, torch)
    strided = tensor.layout is torch.strided
    return TensorMeta(
        dtype=dtype,
        device=str(tensor.device),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()) if strided else (0,) * tensor.dim(),
        offset=0 if odd else tensor.data_ptr() % ALIGNMENT_BYTES,
        odd=odd,
        needs_grad=needs_grad,
    )


def _odd(tensor: Any, torch: Any) -> str:
    """Why compiled code must not see this tensor, "" when it may."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return f"is a {type(tensor).__qualname__}, a subclass of torch.Tensor"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.is_conj():
        return "has its conj bit set"
    if tensor.is_neg():
        return "has its neg bit set"
    if tensor.device.type == "meta":
        return "is on the meta device and has no data"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "is inside a function transform (vmap, grad)"
    return ""


def _state(torch: Any, device: str) -> tuple[str, ...]:
    """What around this call changes eager's result, one line each; empty in the ordinary case."""
    if torch is None:
        return ()
    kind, lines = device.partition(":")[0], []
    if torch.is_autocast_enabled(kind):
        lines.append(f"autocast is on for {kind} with {torch.get_autocast_dtype(kind)}; the variant was built without")
    if torch._C._len_torch_dispatch_stack():
        lines.append("a torch dispatch mode is active")
    if torch._C._functorch.maybe_current_level() is not None:
        lines.append("a function transform (vmap, grad) is active")
    return tuple(lines)


# ------------------------------------------------------------------------------------ the key of a judged call


def leaf_key(leaf: Any) -> object:
    """Equal for two leaves only when every guard judges them alike. TypeError for what is never remembered."""
    kind = type(leaf)
    if kind in _PLAIN_SCALARS:
        return kind, leaf
    if kind is float or kind is complex:
        return kind, repr(leaf)
    return (
        kind, leaf.dtype, leaf.device, leaf.shape, leaf.stride(), leaf.requires_grad, leaf.is_conj(), leaf.is_neg(),
        leaf.data_ptr() % ALIGNMENT_BYTES,
    )  # fmt: skip


_TENSOR_KEY = (
    "{0}.__class__, {0}.dtype, {0}.shape, {0}.stride(), {0}.device, {0}.requires_grad, {0}.is_conj(), {0}.is_neg()"
)
_SCALAR_KEY = "{0}.__class__, {0} if {0}.__class__ in _PLAIN else _leaf_key({0})"
_STATE_KEY = "_grad(), _modes(), _level(), _autocast()"


def compile_entry(
    parameters: tuple[Parameter, ...],
    leaf_kinds: Sequence[str] | None,
    *,
    aligned: bool,
    memo: dict[object, Callable[..., object]],
    slow: Callable[[tuple[object, ...] | None, tuple[object, ...]], object],
) -> Callable[..., object]:
    """A function with the signature of `parameters` that answers judged calls from `memo` and asks `slow` otherwise.

    Python binds the arguments, so defaults, keywords and TypeErrors are those of the model's own forward().
    `slow` gets the key (None where there is none) and the bound arguments. `leaf_kinds` says for each parameter
    "tensor", "scalar" or "mixed" when no parameter is a container, and is None otherwise: then every call goes to
    `slow`, which looks up `container_key` itself. The text compiled here is made of
    parameter names that `format.index` checked to be Python names, and of nothing else from the bundle.
    """
    names = [parameter.name for parameter in parameters]
    scope: dict[str, Any] = {
        "_PLAIN": _PLAIN_SCALARS, "_leaf_key": leaf_key, "_memo": memo, "_slow": slow, 
        **_state_probes(),
    }  # fmt: skip
    signature = _signature(parameters, scope)
    arguments = ", ".join(names) + ("," if len(names) == 1 else "")
    body = [f"    return _slow(None, ({arguments}))"]
    if leaf_kinds is not None and names:
        extra = ", {0}.data_ptr() % 16" if aligned else ""
        templates = {"tensor": _TENSOR_KEY + extra, "scalar": _SCALAR_KEY, "mixed": "_leaf_key({0})"}
        key = ", ".join(templates[kind].format(name) for kind, name in zip(leaf_kinds, names, strict=True))
        body = [
            "    try:",
            f"        _key = ({_STATE_KEY}, {key})",
            "        _serve = _memo.get(_key)",
            "    except Exception:  # an argument of another kind than any judged call had: judged in full",
            "        _key = _serve = None",
            "    if _serve is None:",
            f"        return _slow(_key, ({arguments}))",
            f"    return _serve({', '.join(names)})",
        ]
    text = "\n".join([f"def forward({signature}):", *body])
    exec(compile(text, "<aotpack entry>", "exec"), scope)  # noqa: S102 - see the docstring
    function: Callable[..., object] = scope["forward"]
    return function


def is_plain_key(key: tuple[object, ...]) -> bool:
    """May a call with this key be remembered? Not inside autocast, a dispatch mode or a function transform: the key
    says only that there is one, not which."""
    _, modes, level, autocast = key[:4]
    return not modes and level is None and not autocast


def container_key(trees: tuple[Tree, ...], leaves: Sequence[Any]) -> tuple[object, ...] | None:
    """The key of a call with containers; None when it is not remembered."""
    try:
        key = (*[probe() for probe in _state_probes().values()], trees, *[leaf_key(leaf) for leaf in leaves])
        hash(key)
    except Exception:
        return None
    return key


def _signature(parameters: tuple[Parameter, ...], scope: dict[str, Any]) -> str:
    parts: list[str] = []
    star = False
    for position, parameter in enumerate(parameters):
        text = parameter.name
        if parameter.default is not None:
            scope[f"_default_{position}"] = _rebuild(parameter.default.tree, list(parameter.default.leaves))
            text += f"=_default_{position}"
        if parameter.kind == "var_positional":
            text, star = "*" + text, True
        elif parameter.kind == "var_keyword":
            text = "**" + text
        elif parameter.kind == "keyword_only" and not star:
            parts.append("*")
            star = True
        parts.append(text)
        following = parameters[position + 1].kind if position + 1 < len(parameters) else ""
        if parameter.kind == "positional_only" and following != "positional_only":
            parts.append("/")
    return ", ".join(parts)


def _rebuild(tree: Tree, leaves: list[Any]) -> object:
    """A default value from its tree; only tuples, lists and dicts of scalars are defaults."""
    match tree:
        case ("tuple", *items):
            return tuple(_rebuild(item, leaves) for item in items)
        case ("list", *items):
            return [_rebuild(item, leaves) for item in items]
        case ("dict", keys, *items):
            return {key: _rebuild(item, leaves) for key, item in zip(keys, items, strict=True)}
        case _ if tree == LEAF:
            return leaves.pop(0)
    raise ValueError(f"a default value cannot be {tree!r}")


def _state_probes() -> dict[str, Callable[[], object]]:
    """What a key must hold besides the arguments: grad mode, dispatch modes, transforms, autocast."""
    torch = sys.modules.get("torch")
    if torch is None:
        return dict.fromkeys(("_grad", "_modes", "_level", "_autocast"), lambda: None)
    return {
        "_grad": torch.is_grad_enabled,
        "_modes": torch._C._len_torch_dispatch_stack,
        "_level": torch._C._functorch.maybe_current_level,
        "_autocast": torch._C._is_any_autocast_enabled,
    }


def flatten_all(values: Sequence[object]) -> tuple[tuple[Tree, ...], list[object]]:
    """Trees of all parameters, and their leaves in order."""
    leaves: list[object] = []
    return tuple(flatten(value, leaves) for value in values), leaves
