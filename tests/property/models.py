"""Small models of many families for random calls, written to a zoo as its `zoo.py`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x))).softmax(-1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(image).relu()
        return features, features.mean((2, 3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.out(mixed.transpose(1, 2).flatten(2))


class Cell(nn.Module):
    """An LSTM cell: state in, state out; the hidden tensor comes back twice. `nn.LSTMCell` itself crashes (torch 2.13,
    autocast, one row with a state of many)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(14, 24)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, memory = state
        enter, keep, new, show = self.gates(torch.cat((x, hidden), -1)).chunk(4, -1)
        memory = keep.sigmoid() * memory + enter.sigmoid() * new.tanh()
        hidden = show.sigmoid() * memory.tanh()
        return hidden, (hidden, memory)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).mean(1)


class Scalars(nn.Module):
    def forward(self, x: Tensor, k: int, flag: bool = True, alpha: float = 0.5) -> Tensor:  # noqa: FBT001, FBT002
        return x * k + alpha if flag else x * k - alpha


class Narrow(nn.Module):
    def forward(self, x: Tensor, n: int) -> tuple[Tensor, int]:
        return x.narrow(0, 0, n).sum(), 2 * n


class Optional(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return x * 2 * scale if mask is None else x * mask * scale


class Nested(nn.Module):
    def forward(self, q: dict[str, Any], pair: tuple[Tensor, int]) -> dict[str, Any]:
        a, (b, c) = q["a"], q["more"]
        total = a + b
        inner = (total[:, :2] * c, 3, None, "s", a.shape[0], 1.5, True)
        return {"total": total, "list": [c.sum(0), inner], "same": a, "turned": total.t(), "x": pair[0] * pair[1]}


class Running(nn.Module):
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.total.mul_(0.5).add_(x.sum(0))
        self.rows = self.rows + x.shape[0]
        return self.total * self.scale + self.rows


class Reshape(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, bias: float = 1.0, **more: Tensor) -> Tensor:
        out = x.reshape(4, -1) * 2 + bias
        for extra in (*rest, *more.values()):
            out = out + extra
        return out


class Grouped(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.view(y.shape[0], -1) * 2


class Branches(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int, bool]:
        many = bool(x.shape[0] > 4)
        return (x * 2 if many else x - 1).squeeze(0), x.shape[0], many


class Complex(nn.Module):
    def forward(self, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return z * w.conj() + 1, (z + w).abs(), z.conj()


class Writing(nn.Module):
    """Writes its arguments, in an order that shows when both are one tensor."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.add_(1)
        y.mul_(x)
        return x, y.sum(), x.t()


class Reading(nn.Module):
    """Writes one argument and reads the other afterwards."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def mlp() -> nn.Module:
    return seeded(Mlp)


def conv() -> nn.Module:
    return seeded(Conv)


def attention() -> nn.Module:
    return seeded(Attention)


def cell() -> nn.Module:
    return seeded(Cell)


def embed() -> nn.Module:
    return seeded(Embed)


def scalars() -> nn.Module:
    return seeded(Scalars)


def narrow() -> nn.Module:
    return seeded(Narrow)


def optional() -> nn.Module:
    return seeded(Optional)


def nested() -> nn.Module:
    return seeded(Nested)


def running() -> nn.Module:
    return seeded(Running)


def reshape() -> nn.Module:
    return seeded(Reshape)


def grouped() -> nn.Module:
    return seeded(Grouped)


def branches() -> nn.Module:
    return seeded(Branches)


def complexes() -> nn.Module:
    return seeded(Complex)


def writing() -> nn.Module:
    return seeded(Writing)


def reading() -> nn.Module:
    return seeded(Reading)
