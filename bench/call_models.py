"""The models of bench/calls.yaml: one that does nearly nothing, and one whose work is in libraries."""

import torch
from torch import Tensor, nn


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def one_tensor() -> nn.Module:
    return AddOne().eval()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return Layers().eval()
