"""The graph that Inductor lowered for a GPU, run in host memory: what its passes took for granted shows there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Interpreter, Node

_aten = torch.ops.aten


class Lowered:
    """One graph; its weights are zeros, as those of every compile are. `run` raises where it holds something that runs
    on a GPU alone."""

    def __init__(self, module: GraphModule) -> None:
        # The lowering goes on with the same nodes, and may change them.
        self._module = GraphModule(module, copy.deepcopy(module.graph))
        self._shapes = {node.name: node.meta.get("val") for node in module.graph.nodes if node.op == "get_attr"}

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        found = _OnHost(self._module, self._shapes).run(*inputs)
        return [item for item in found if isinstance(item, torch.Tensor)]


@contextmanager
def noted_lowering(found: list[Lowered]) -> Iterator[None]:
    """Every graph that is lowered inside is added to `found`."""
    from torch._inductor import compile_fx

    base: Any = vars(compile_fx)["GraphLowering"]

    class Noted(base):  # type: ignore[misc]
        def __init__(self, gm: GraphModule, *args: Any, **kwargs: Any) -> None:
            found.append(Lowered(gm))
            super().__init__(gm, *args, **kwargs)

    with mock.patch.object(compile_fx, "GraphLowering", Noted):
        yield


class _OnHost(Interpreter):
    def __init__(self, module: GraphModule, shapes: dict[str, Any]) -> None:
        super().__init__(module)
        self._weights: dict[str, torch.Tensor] = {}
        self._shapes = shapes

    def run_node(self, n: Node) -> Any:
        if n.op != "get_attr":
            return super().run_node(n)
        value = getattr(self.module, str(n.target), None) if "." not in str(n.target) else None
        look = self._shapes.get(n.name)
        look = value if look is None else look
        if not isinstance(look, torch.Tensor):
            return super().run_node(n)  # a subgraph
        if str(n.target) not in self._weights:
            self._weights[str(n.target)] = torch.empty_strided(look.shape, look.stride(), dtype=look.dtype).zero_()
        return self._weights[str(n.target)]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        def placed(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), placed)
        attention = _ATTENTION.get(target)
        if attention is not None:
            return attention(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _plain(schema: torch.FunctionSchema, results: int) -> Callable[..., Any]:
    """The attention operator of this `schema`, by plain matrix products; its first result of `results`."""
    names = [argument.name for argument in schema.arguments]

    def attention(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key = given["query"], given["key"]
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, given["value"], given.get("attn_bias"), given.get("dropout_p", 0.0),
            given.get("is_causal", False), scale=given.get("scale"), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return (result, *[None] * (results - 1))

    return attention


_ATTENTION = {
    operator: _plain(operator._schema, len(operator._schema.returns))
    for operator in (
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
    )
}
"""Operators that a CPU lacks."""
