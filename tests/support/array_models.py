"""Models for calls with arrays, written to a zoo as its `zoo.py`."""

import torch
from torch import Tensor, nn


class Half(nn.Module):
    """bfloat16 in, bfloat16 and float16 out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y.to(torch.float16)


class Turned(nn.Module):
    """Two names for one weight, and one that is stored with its dims in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6).t())
        self.down = nn.Linear(4, 3, bias=False)
        self.again = self.down

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.up
        return self.again(hidden) + self.down(hidden.relu())


def half() -> nn.Module:
    torch.manual_seed(0)
    return Half().eval()


def turned() -> nn.Module:
    torch.manual_seed(0)
    return Turned().eval()
