"""Which attention kernel serves `scaled_dot_product_attention` on a GPU, where that is not left to torch.

torch asks the CUDA runtime from C++ while it traces (ATen's sdp_utils.cpp, torch 2.11). For a GPU that is not here the
record of the device is asked instead, by the same conditions in the same order: cuDNN on Hopper and Blackwell where it
is new enough, flash, memory efficient, plain matrix products. A table of `aotpack tune` may pick another of those that
are possible. What the manifest names goes before both, and is chosen here for a GPU at hand too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from aotpack.devices import AttentionWay as Way
from aotpack_runtime.errors import CompileError

CUDNN_PREFERRED_FROM = 91501
"""Before it sizes that are no multiples of 128 went wrong (pytorch/pytorch#169849)."""

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One call: what it is known by in a table, the sizes it was traced with, the kernels that can serve it, and which
    was taken."""

    key: str
    query: tuple[int, ...]
    kept: tuple[int, ...]
    mask: tuple[int, ...] | None
    dtype: str
    causal: bool
    ways: tuple[Way, ...]
    taken: Way


@dataclass(slots=True)
class Attentions:
    """Chooses for the attention of one compile: the first of `named` that can serve a call; where none is named what
    `table` has for the key of the call, the kernel that was fastest; else what torch would choose."""

    table: Mapping[str, str] = field(default_factory=dict)
    named: tuple[Way, ...] = ()
    made: list[Attention] = field(default_factory=list)
    refused: str = ""

    @property
    def taken(self) -> list[Way]:
        """The kernels that serve, each once."""
        return sorted({attention.taken for attention in self.made})

    def choose(self, key: str, ways: tuple[Way, ...]) -> Way:
        """The kernel for a call that `ways` can serve; UnservedAttentionError when none of them is named."""
        if not self.named:
            wanted = self.table.get(key)
            return next((way for way in ways if way == wanted), ways[0])
        for way in self.named:
            if way in ways:
                return way
        self.refused = (
            f"attention of {key} is served by {' or '.join(ways)}, and the manifest's `attention` names "
            f"{' and '.join(self.named)} alone"
        )
        raise UnservedAttentionError(self.refused)


class UnservedAttentionError(Exception):
    """Ends a trace; torch wraps it in errors of its own, so what it says is kept in `Attentions` too."""


@contextmanager
def attention_for(properties: Any, attentions: Attentions, variant: str = "") -> Iterator[None]:
    """Attention that is traced inside is that of a device of `properties` (as torch names them); what was chosen is
    noted in `attentions`. CompileError where no kernel that the manifest names can serve a call."""

    def attention(  # the operator's own signature
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        tensors = (query, key, value, attn_mask)
        way: Way = "math"
        if query.device.type == "cuda":
            ways = possible(properties, *tensors, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa)
            noted = _noted(query, key, attn_mask, ways, attentions, causal=is_causal)
            attentions.made.append(noted)
            way = noted.taken
        if way == "math":
            result, _ = _aten._scaled_dot_product_attention_math(
                *tensors, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
            return result
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        if way == "cudnn":
            return _aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, False, dropout_p, is_causal, False, scale=scale
            )[0]
        if way == "flash":
            return _flash(query, key, value, dropout_p, scale, is_causal=is_causal)
        if enable_gqa:
            key, value = _repeated(key, query), _repeated(value, query)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale
        )[0]

    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says of every kernel that is replaced that it is
            library.impl("scaled_dot_product_attention", attention, "CompositeImplicitAutograd", allow_override=True)
        yield
    except Exception as error:
        if not attentions.refused:
            raise
        hint = "add one that can serve it to the entry's `attention`"
        raise CompileError(variant, attentions.refused, hint=hint) from error
    finally:
        library._destroy()


def possible(
    properties: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[Way, ...]:
    """The kernels that can serve a call on the device; torch would choose the first."""
    if not (query.dim() == key.dim() == value.dim() == 4) or not _same_heads(query, key, value, grouped=enable_gqa):
        return ("math",)
    known = guard_or_false
    dense = all(known(tensor.stride(-1) == 1) for tensor in (query, key, value))
    sizes, key_size, value_size = query.shape[-1], key.shape[-1], value.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16) and properties.major >= 8
    alike = query.dtype == key.dtype == value.dtype
    nowhere_empty = not any(known(tensor.shape[2] == 0) for tensor in (query, key))
    if not alike or not dense or not nowhere_empty:
        return ("math",)
    ways: list[Way] = []
    if half and properties.major in (9, 10) and _cudnn_version() >= CUDNN_PREFERRED_FROM:
        fits = all(known(size <= 128) and known(size % 8 == 0) for size in (sizes, value_size))
        if fits and known(key.shape[2] != 1) and not dropout_p:
            ways.append("cudnn")
    square = not is_causal or known(query.shape[2] == key.shape[2])
    same_sizes = known(sizes == key_size) and known(sizes == value_size)
    if half and mask is None and square and same_sizes and known(sizes <= 256):
        ways.append("flash")
    if query.dtype in (torch.float16, torch.bfloat16, torch.float32):
        aligned = 8 if query.dtype != torch.float32 else 4
        if known(sizes == key_size) and all(known(size % aligned == 0) for size in (sizes, value_size)):
            ways.append("efficient")
    return (*ways, "math")


def _noted(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    ways: tuple[Way, ...],
    attentions: Attentions,
    *,
    causal: bool,
) -> Attention:
    sizes, kept = (tuple(_hint(size) for size in tensor.shape) for tensor in (query, key))
    dtype = str(query.dtype).removeprefix("torch.")
    words = [dtype, "x".join(map(str, (*sizes[1:2], sizes[-1]))), "x".join(map(str, (*kept[1:2], kept[-1])))]
    words += ["mask"] if mask is not None else []
    words += ["causal"] if causal else []
    return Attention(
        key=" ".join(words),
        query=sizes,
        kept=kept,
        mask=None if mask is None else tuple(map(_hint, mask.shape)),
        dtype=dtype,
        causal=causal,
        ways=ways,
        taken=attentions.choose(" ".join(words), ways),
    )


def _hint(size: int | torch.SymInt) -> int:
    """The size that a trace was made with, 64 where only values tell."""
    hint = size if isinstance(size, int) else size.node.hint
    return 64 if hint is None else int(hint)


def _cudnn_version() -> int:
    return torch.backends.cudnn.version() or 0


def _same_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, grouped: bool) -> bool:
    batches = guard_or_false(query.shape[0] == key.shape[0]) and guard_or_false(query.shape[0] == value.shape[0])
    heads = guard_or_false(key.shape[1] == value.shape[1])
    divisor = query.shape[1] % key.shape[1] if grouped else query.shape[1] - key.shape[1]
    return batches and heads and guard_or_false(divisor == 0)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    scale: float | None,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Heads are padded to a multiple of 8, scaled by their own size, and cut back."""
    size = query.shape[-1]
    missing = -size % 8
    if missing:
        query, key, value = (torch.nn.functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
        scale = size**-0.5 if scale is None else scale
    result: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result[..., :size] if missing else result


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> Any:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)
