"""The zoo `output_state_cases`: what results are made of, and what models keep between calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aotpack.jobs import Result
from tests.support.building import ROOT, build_in, build_zoo, entry

MODELS = """
import collections
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


def make(name, **arguments):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return globals()[name](**arguments).eval()


# ---------------------------------------------------------------------------------------------------------- results


class Optional(nn.Module):
    def forward(self, x, mask=None):
        return x * 2 if mask is None else x * mask


class Leaves(nn.Module):
    def forward(self, x):
        return {
            "int": (x * 2, 3),
            "str": (x * 2, "s"),
            "float": (x * 2, 1.5),
            "bool": (x * 2, True),
            "none": (x * 2, None),
            "size": (x * 2, x.shape[0]),
            "computed": x.shape[0] * 2 + 1,
            "nested": [x + 1, (x - 1, {"z": x * 3, "a": [None, ()]}), {}],
            7: x * 4,
        }


@dataclass
class Inp:
    a: torch.Tensor
    b: torch.Tensor


@dataclass
class Registered:
    a: torch.Tensor
    b: torch.Tensor


@dataclass
class Named:
    a: torch.Tensor
    b: torch.Tensor


torch.export.register_dataclass(Registered)
torch.export.register_dataclass(Named, serialized_type_name="zoo.Named")


class Classes(nn.Module):
    def forward(self, q, r, n):
        return q.a + q.b, r.a + 2 * r.b, n.a + 3 * n.b


class Aliases(nn.Module):
    def forward(self, x):
        y = x * x
        return y, y.view(-1), x, x.t()


class Shares(nn.Module):
    def forward(self, x):
        y, z, w, v = x * 2, x * 3, x * 4, x * 5
        return {
            "twice": (y, y),
            "part_first": (z[1:], z),
            "transposed_first": (w.t(), w),
            "same_part_twice": (v[1:], v[1:]),
        }


class GivesWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return {
            "scale": self.scale,
            "table": self.table,
            "row": self.table[1],
            "count": self.count,
            "twice": x * 2,
        }


class Writes(nn.Module):
    def forward(self, x, y):
        doubled = y.mul_(2)
        x.add_(1)
        return x, x + y, doubled


class Silent(nn.Module):
    def forward(self, x):
        x.add_(1)


@dataclass
class Output:
    first: torch.Tensor
    second: torch.Tensor
    size: int


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Fields(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        match self.kind:
            case "class":
                return Output(x + 1, x + 2, x.shape[0])
            case "dict":
                return {"first": x + 1, "second": x + 2, "size": x.shape[0]}
            case "tuple":
                return x + 1, x + 2, x.shape[0]
            case "named tuple":
                return Pair(x + 1, x + 2)
            case "max":
                return torch.max(x, dim=0)
            case "set":
                return {x + 1}
            case "ordered dict":
                return collections.OrderedDict(first=x + 1)
            case "parts":
                y = x * 2
                return y[1:], y[2:]
            case "bits":
                y = x * 2
                return y, y.view(torch.int32)


# ------------------------------------------------------------------------------------------------------------ state


class Ema(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.zeros(2, 4))
        self.register_buffer("s", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)

    def forward(self, x):
        self.h.mul_(0.5).add_(x)
        return self.h * self.s


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.n.add_(1)
        return self.n + x


class Reassigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x):
        self.n = self.n + 1
        return self.n + x


class SometimesCounts(nn.Module):
    # The traced branch leaves `n` alone: it is state on the way through the source only.
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x, step=None):
        if step is not None:
            self.n = self.n + step
        return x + self.n


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class TiedTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 512)
        self.head = nn.Linear(512, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


class OddWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.expanded = nn.Parameter(torch.randn(1, 5).expand(3, 5))
        self.register_buffer("turned", torch.randn(2, 3, 4).permute(2, 0, 1))
        self.register_buffer("spread", torch.randn(3, 1).expand(3, 2))
        self.register_buffer("part", torch.randn(6)[2:5])
        self.register_buffer("zero_d", torch.tensor(2.0))
        self.register_buffer("whole", torch.tensor(3))
        self.register_buffer("three", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.encoder = nn.Linear(5, 3, bias=False)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.t())
        self.plain = torch.tensor([10.0, 20.0, 30.0])

    def forward(self, image, x):
        shifts = torch.tensor([0.5, 1.5, 2.5])
        shifts.add_(1)
        return {
            "conv": self.norm(self.conv(image)),
            "transposed": x @ self.transposed,
            "expanded": x @ self.expanded.t(),
            "turned": self.turned * 2,
            "spread": self.spread + 1,
            "part": x.sum() + self.part,
            "zero_d": x * self.zero_d,
            "whole": x + self.whole,
            "three": self.three * 2,
            "empty": torch.cat([self.empty, self.three[None]]),
            "autoencoder": self.decoder(self.encoder(x)),
            "plain": self.plain + x.sum(),
            "literal": shifts * x.sum(),
        }


class Swaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((1024, 1024), 1 / 1024))

    def forward(self, x):
        return torch.relu(x @ self.w) + 1


# ------------------------------------------------------------------------------------------------------------- mode


def linear():
    return nn.Linear(4, 4)


class InnerAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x)


def learns():
    return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).train()


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


# --------------------------------------------------------------------------------------- as libraries of models do it


# Puts in by name what was left out, as transformers does; it knows of no place that the argument has.
def with_defaults(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        if kwargs.get("cached") is None:
            kwargs["cached"] = True
        return forward(self, *args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    @with_defaults
    def forward(self, x, mask=None, cached=None):
        x = x if mask is None else x * mask
        return x * 2 if cached else x


# A weight of bytes with a scale for each row, as torchao has it: a tensor made of tensors.
class Bytes(torch.Tensor):
    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values, scale):
        self.values_, self.scale_ = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale_"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, _, size, stride):
        return cls(tensors["values_"], tensors["scale_"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, *bias = args
            return func(x, weight.values_.to(x.dtype) * weight.scale_, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].values_), func(args[0].scale_))
        raise NotImplementedError(f"{func} of bytes")


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        weight = Bytes(torch.randint(-127, 128, (3, 4), dtype=torch.int8), torch.rand(3, 1) / 127)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return self.linear(x)


# ---------------------------------------------------------------------------------------------------------- refused


def packed():
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}).eval()


class Translates(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)

    def forward(self, x):
        return self.layers(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class CountsInPython(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class PlainState(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.n = how, torch.zeros(1)

    def forward(self, x):
        if self.how == "in place":
            self.n.add_(1)
        else:
            self.n = self.n + 1
        return x + self.n


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x])
        return self.seen.sum()


class OverlappingState(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 4))
        self.register_buffer("row", self.table[0])

    def forward(self, x):
        self.table.add_(x)
        return self.row * 2
"""


def floats(*shape: int | str, **more: Any) -> dict[str, Any]:
    """A float32 tensor of the manifest."""
    return {"shape": list(shape), "dtype": "float32", **more}


def model(name: str, inputs: dict[str, Any], points: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    """An entry of the model `name` of this zoo, in eval mode."""
    return entry("make", inputs, points, **{**more, "args": {"name": name, **more.get("args", {})}})


def of_class(name: str) -> dict[str, Any]:
    return {"class": f"zoo:{name}", "fields": {"a": floats(3), "b": floats(3)}}


NAMES = ["second", "first"]
SOME = [{"dims": {"b": {"min": 1, "max": 8}}}]
ENTRIES = {
    "optional": model("Optional", {"x": floats(2)}),
    "leaves": model("Leaves", {"x": floats("b")}, SOME),
    "classes": model("Classes", {"q": of_class("Inp"), "r": of_class("Registered"), "n": of_class("Named")}),
    "aliases": model("Aliases", {"x": floats(2, 3)}),
    "shares": model("Shares", {"x": floats("b", 3)}, [{"dims": {"b": {"min": 3, "max": 8}}}]),
    "gives_weights": model("GivesWeights", {"x": floats(2)}),
    "writes": model("Writes", {"x": floats("b"), "y": floats("b")}, SOME),
    "silent": model("Silent", {"x": floats(2)}),
    "class_fields": model("Fields", {"x": floats(2)}, args={"kind": "class"}, outputs=[*NAMES, "size"]),
    "dict_fields": model("Fields", {"x": floats(2)}, args={"kind": "dict"}, outputs=NAMES),
    "tuple_fields": model("Fields", {"x": floats(2)}, args={"kind": "tuple"}, outputs=[*NAMES, "size"]),
    "named_fields": model("Fields", {"x": floats(2)}, args={"kind": "named tuple"}, outputs=NAMES),
    "max_fields": model("Fields", {"x": floats(4, 2)}, args={"kind": "max"}, outputs=["values", "indices"]),
    "ema": model("Ema", {"x": floats(2, 4)}),
    "counter": model("Counter", {"x": {"shape": ["b"], "dtype": "int64"}}, [{"dims": {"b": [2, 3]}}]),
    "reassigns": model("Reassigns", {"x": floats(1)}),
    "sometimes_counts": model("SometimesCounts", {"x": floats(1)}),
    "tied": model("Tied", {"x": floats(1, 4)}),
    "tied_table": model("TiedTable", {"ids": {"shape": [2], "dtype": "int64", "fill": {"randint": [0, 1000]}}}),
    "odd_weights": model("OddWeights", {"image": floats(1, 3, 6, 6), "x": floats(2, 5)}),
    "swaps": model("Swaps", {"x": floats("b", 1024)}, [{"dims": {"b": {"min": 2, "max": 33}}}]),
    "linear": model("linear", {"input": floats(2, 4)}),
    "inner_autocast": model("InnerAutocast", {"x": floats(2, 4)}),
    "learns": entry("learns", {"input": floats(8, 4)}, training=True),
    "noise": model("Noise", {"x": floats(64)}),
    "decorated": model("Decorated", {"x": floats("b"), "mask": floats("b", optional=True)}, SOME),
    "quantized": model("Quantized", {"x": floats("b", 4)}, SOME),
}


REFUSED = {
    "fine": ENTRIES["silent"],
    "noise": ENTRIES["noise"],
    **{
        name: model("Fields", {"x": floats(4)}, args={"kind": kind}, **more)
        for name, kind, more in (
            ("named_tuple", "named tuple", {}),
            ("dataclass", "class", {}),
            ("structseq", "max", {}),
            ("ordered_dict", "ordered dict", {}),
            ("set", "set", {}),
            ("unknown_name", "dict", {"outputs": ["first", "third"]}),
            ("unknown_field", "class", {"outputs": ["first", "third"]}),
            ("too_few_names", "tuple", {"outputs": ["first", "second"]}),
            ("parts", "parts", {}),
            ("bits", "bits", {}),
        )
    },
    "train_mode": entry("learns", {"input": floats(8, 4)}),
    "packed": entry("packed", {"input": floats(2, 4)}),
    "translates": model("Translates", {"x": floats(2, 5, 8)}),
    "counts_in_python": model("CountsInPython", {"x": floats(1)}),
    "plain_in_place": model("PlainState", {"x": floats(1)}, args={"how": "in place"}),
    "plain_assigned": model("PlainState", {"x": floats(1)}, args={"how": "assigned"}),
    "grows": model("Grows", {"x": floats(1)}),
    "overlapping_state": model("OverlappingState", {"x": floats(4)}),
}
"""What a build turns down, beside two entries that it does not."""


def bundle() -> Path:
    """The zoo's bundle, built at most once however many test processes ask."""
    return build_zoo("output_state_cases", MODELS, ENTRIES)


def refused() -> Result:
    """A build of what cannot be bundled, which leaves it out and says why."""
    return build_in(ROOT / "output_state_refused", MODELS, REFUSED, keep_going=True)
