"""What a model may do on a GPU: small, seeded, in eval mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 32)).eval()


class Attention(nn.Module):
    """Grouped causal attention with a rotary embedding, as decoders have it."""

    def __init__(self, width: int = 256, heads: int = 8, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * groups * self.size)
        self.register_buffer("frequency", 1e4 ** -(torch.arange(0, self.size, 2) / self.size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        angle = torch.arange(length, device=x.device)[:, None] * self.frequency
        turn = torch.cat([angle, angle], -1)
        query = self._turned(self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2), turn)
        key, value = self.key_value(x).view(batch, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        repeats = self.heads // self.groups
        key = self._turned(key, turn).repeat_interleave(repeats, 1)
        found = F.scaled_dot_product_attention(query, key, value.repeat_interleave(repeats, 1), is_causal=True)
        return found.transpose(1, 2).reshape(batch, length, -1)

    @staticmethod
    def _turned(x: Tensor, turn: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return (x * turn.cos() + torch.cat([-right, left], -1) * turn.sin()).to(x.dtype)


def attention() -> nn.Module:
    torch.manual_seed(0)
    return Attention().eval()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return Convolution().eval()


class Literals(nn.Module):
    """Literals stay in host memory while the model is on a GPU, and so does what is made without a device."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ramp = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)
        return x * torch.tensor(2.5) + ramp[:, None], torch.tensor([1.0, 2.0]).to(x.device), torch.ones(3)


def literals() -> nn.Module:
    return Literals().eval()


class Counter(nn.Module):
    """Keeps state between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        return x + self.total


def counter() -> nn.Module:
    return Counter().eval()


class Writer(nn.Module):
    """Writes its argument, and hands a view of it back."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return x.t(), x.sum(1)


def writer() -> nn.Module:
    return Writer().eval()


class Taking(nn.Module):
    """A table that is looked up, the best of a row, and an int that stays open."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(100, 32)

    def forward(self, ids: Tensor, keep: int) -> dict[str, Tensor]:
        rows = self.table(ids).cumsum(1)
        best = rows.sum(-1).topk(3, dim=1)
        return {"kept": rows[:, :keep], "best": best.values, "where": best.indices}


def taking() -> nn.Module:
    return Taking().eval()
