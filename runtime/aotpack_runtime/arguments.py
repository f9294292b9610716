"""Live arguments -> Call, and the short key under which a judged call is remembered.

A tensor is asked for numbers only (`shape`, `stride()`, `dtype`, `device`): torch is never imported here, only
looked up in `sys.modules` when the caller has imported it. What surrounds a call and changes eager's result
(autocast, dispatch modes, function transforms) is read the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aotpack_runtime.format.guard import TensorGuard
from aotpack_runtime.format.index import Entry, Parameter, Variant
from aotpack_runtime.format.tensor import ALIGNMENT_BYTES, OVERRIDDEN, SUBCLASS, Call, Leaf, Other, TensorMeta
from aotpack_runtime.format.tree import LEAF, Tree, flatten, paths
from aotpack_runtime.imported import imported
from aotpack_runtime.interfaces import overlapping
from aotpack_runtime.record import replace

_PLAIN_SCALARS = frozenset({bool, int, str, type(None)})


def describe(trees: tuple[Tree, ...], leaves: Sequence[object], device: str) -> Call:
    """The call as guards see it; `device` ("cpu", "cuda:0") is where the entry runs."""
    torch = imported("torch")
    described = [_describe(leaf, torch, device) for leaf in leaves]
    for position in sharing(leaves) if torch is not None else ():
        if isinstance(found := described[position], TensorMeta):
            described[position] = replace(found, shared=True)
    return Call(trees, tuple(described), _state(torch, device))


def _describe(leaf: object, torch: Any, device: str) -> Leaf:
    kind = type(leaf)
    if kind in _PLAIN_SCALARS or kind is float or kind is complex:
        return leaf  # type: ignore[return-value]
    if torch is not None and isinstance(leaf, torch.Tensor):
        return _describe_tensor(leaf, torch, device)
    return Other(f"an instance of {kind.__module__}.{kind.__qualname__}")


def _describe_tensor(tensor: Any, torch: Any, device: str) -> TensorMeta:
    dtype = str(tensor.dtype).removeprefix("torch.")
    needs_grad = bool(tensor.requires_grad and torch.is_grad_enabled())
    odd = _odd(tensor, torch)
    if not odd and tensor.is_cuda and device.startswith("cuda:") and str(tensor.device) != device:
        odd = f"is on {tensor.device}, the session is for {device}"
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return TensorMeta(
        dtype=dtype,
        device=str(tensor.device),
        shape=tuple(tensor.shape) if strided or not tensor.is_nested else (0,) * tensor.dim(),
        strides=tuple(tensor.stride()) if strided else (0,) * tensor.dim(),
        offset=0 if odd else tensor.data_ptr() % ALIGNMENT_BYTES,
        odd=odd,
        needs_grad=needs_grad,
        locked=tensor.is_inference() and not torch.is_inference_mode_enabled(),
    )


def _odd(tensor: Any, torch: Any) -> str:
    """Why compiled code must not see this tensor, "" when it may."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        function = kind.__torch_function__
        plain = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)
        if getattr(function, "__func__", function) not in plain:
            return f"is a {kind.__qualname__}: {OVERRIDDEN} by its class"
        return f"is a {kind.__qualname__}, {SUBCLASS}"
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
    if torch.autograd.forward_ad._current_level >= 0:
        lines.append("forward derivatives are recorded")
    if torch._C._len_torch_function_stack():
        for mode in torch.overrides._get_current_function_mode_stack():
            device_type = mode.device.type if type(mode) is torch.utils._device.DeviceContext else ""
            if device_type != kind:
                lines.append(f"{OVERRIDDEN} by the mode {type(mode).__qualname__} {device_type}".rstrip())
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
        leaf.data_ptr() % ALIGNMENT_BYTES, leaf.is_inference(),
    )  # fmt: skip


def sharing(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the tensors in whose memory, from first to last element, another one lies."""
    spans: list[tuple[int, int, int]] = []
    for position, leaf in enumerate(leaves):
        try:
            size_bytes = leaf.itemsize
            for size, stride in zip(leaf.shape, leaf.stride(), strict=True):
                size_bytes += (size - 1) * stride * leaf.itemsize
            if leaf.numel():
                spans.append((leaf.data_ptr(), leaf.data_ptr() + size_bytes, position))
        except Exception:  # noqa: S112 - no tensor, or none that has memory
            continue
    return overlapping(spans)


_TENSOR_KEY = (
    "{0}.__class__, {0}.dtype, {0}.shape, {0}.stride(), {0}.device, {0}.requires_grad, {0}.is_conj(), {0}.is_neg()"
)
_SCALAR_KEY = "{0}.__class__, {0} if {0}.__class__ in __PLAIN else __leaf_key({0})"
_STATE_KEY = "__grad(), __modes(), __level(), __autocast(), __functions(), __forward._current_level"


def compile_entry(
    parameters: tuple[Parameter, ...],
    leaf_kinds: Sequence[str] | None,
    *,
    aligned: bool,
    written: bool = False,
    memo: dict[object, Callable[..., object]],
    slow: Callable[[tuple[object, ...] | None, tuple[object, ...]], object],
) -> Callable[..., object]:
    """A function with the signature of `parameters` that answers judged calls from `memo` and asks `slow` otherwise.

    Python binds the arguments, so defaults, keywords and TypeErrors are those of the model's own forward().
    `slow` gets the key (None where there is none) and the bound arguments. `leaf_kinds` says for each parameter
    "tensor", "scalar" or "mixed" when no parameter is a container, and is None otherwise: then every call goes to
    `slow`, which looks up `container_key` itself. The text compiled here is made of parameter names that
    `format.index` checked to be Python names that do not begin with `__`, as all others here do, and of nothing else
    from the bundle.
    """
    names = [parameter.name for parameter in parameters]
    scope: dict[str, Any] = {
        "__PLAIN": _PLAIN_SCALARS, "__leaf_key": leaf_key, "__memo": memo, "__slow": slow, "__Error": Exception,
        "__sharing": sharing, "__inference": _inference_probe(),
        "__forward": _forward_derivatives(), **_state_probes(),
    }  # fmt: skip
    signature = signature_text(parameters, scope)
    arguments = ", ".join(names) + ("," if len(names) == 1 else "")
    body = [f"    return __slow(None, ({arguments}))"]
    if leaf_kinds is not None and names:
        extra = (", {0}.data_ptr() % 16" if aligned else "") + (", {0}.is_inference()" if written else "")
        templates = {"tensor": _TENSOR_KEY + extra, "scalar": _SCALAR_KEY, "mixed": "__leaf_key({0})"}
        key = ", ".join(templates[kind].format(name) for kind, name in zip(leaf_kinds, names, strict=True))
        if written:
            key += f", __sharing(({arguments})), __inference()"
        body = [
            "    try:",
            f"        __key = ({_STATE_KEY}, {key})",
            "        __serve = __memo.get(__key)",
            "    except __Error:  # an argument of another kind than any judged call had: judged in full",
            "        __key = __serve = None",
            "    if __serve is None:",
            f"        return __slow(__key, ({arguments}))",
            f"    return __serve({', '.join(names)})",
        ]
    text = "\n".join([f"def forward({signature}):", *body])
    exec(compile(text, "<aotpack entry>", "exec"), scope)  # noqa: S102 - see the docstring
    function: Callable[..., object] = scope["forward"]
    _keep_whole(function)
    return function


def _keep_whole(function: Any) -> None:
    """`torch.compile` of code that calls `function` breaks its graph here, and leaves all below as it is; otherwise it
    would trace the dispatch itself, size by size."""
    function._torchdynamo_disable = True
    torch = imported("torch")
    frames: Any = getattr(getattr(getattr(torch, "_C", None), "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def is_plain_key(key: tuple[object, ...]) -> bool:
    """May a call with this key be remembered? Not inside autocast, a mode, a function transform or a level of forward
    derivatives: the key says only that there is one, not which."""
    return key[1:6] == (0, None, False, 0, -1)


def container_key(trees: tuple[Tree, ...], leaves: Sequence[Any], *, written: bool) -> tuple[object, ...] | None:
    """The key of a call with containers; None when it is not remembered."""
    try:
        state = [probe() for probe in _state_probes().values()]
        key = (*state, _forward_derivatives()._current_level, trees, *[leaf_key(leaf) for leaf in leaves])
        if written:
            key = (*key, sharing(leaves), _inference_probe()())
        hash(key)
    except Exception:
        return None
    return key


def signature_text(parameters: tuple[Parameter, ...], scope: dict[str, Any]) -> str:
    parts: list[str] = []
    star = False
    for position, parameter in enumerate(parameters):
        text = parameter.name
        if parameter.default is not None:
            scope[f"__default_{position}"] = _rebuild(parameter.default.tree, list(parameter.default.leaves))
            text += f"=__default_{position}"
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
    """What a key must hold besides the arguments: grad mode, dispatch modes, transforms, autocast, function modes."""
    torch = imported("torch")
    if torch is None:
        return dict.fromkeys(("__grad", "__modes", "__level", "__autocast", "__functions"), lambda: None)
    return {
        "__grad": torch.is_grad_enabled,
        "__modes": torch._C._len_torch_dispatch_stack,
        "__level": torch._C._functorch.maybe_current_level,
        "__autocast": torch._C._is_any_autocast_enabled,
        "__functions": torch._C._len_torch_function_stack,
    }


def _inference_probe() -> Callable[[], object]:
    """Is inference mode on? Only there may tensors that were made in it be written."""
    torch = imported("torch")
    found: Callable[[], object] = torch.is_inference_mode_enabled if torch is not None else lambda: None
    return found


def _forward_derivatives() -> Any:
    """Where torch keeps the level of forward derivatives, `_current_level`: a function that asks would cost more."""
    torch = imported("torch")
    return torch.autograd.forward_ad if torch is not None else None


def flatten_all(values: Sequence[object]) -> tuple[tuple[Tree, ...], list[object]]:
    """Trees of all parameters, and their leaves in order."""
    leaves: list[object] = []
    return tuple(flatten(value, leaves) for value in values), leaves


def leaf_paths(names: Sequence[str], trees: Sequence[Tree]) -> list[str]:
    """Where each leaf sits, in the order of `flatten_all`."""
    return [path for name, tree in zip(names, trees, strict=True) for path in paths(tree, name)]


def leaf_kinds_of(record: Entry, variants: Sequence[Variant]) -> tuple[str, ...] | None:
    """For each parameter what variants expect: "tensor", "scalar" or "mixed"; None when any takes containers."""
    seen: list[set[bool]] = [set() for _ in record.parameters]
    for variant in variants:
        if any(tree != LEAF for tree in variant.guards.trees):
            return None
        for kinds, guard in zip(seen, variant.guards.leaves, strict=True):
            kinds.add(isinstance(guard, TensorGuard))
    return tuple("mixed" if len(kinds) != 1 else "tensor" if True in kinds else "scalar" for kinds in seen)
