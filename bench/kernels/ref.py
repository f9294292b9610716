"""What the kernels of the benchmark must compute, in torch."""

from torch import Tensor


def add(*, x: Tensor, y: Tensor, o: Tensor, n: int) -> Tensor:
    result = o.clone()
    result[:n] = x[:n] + y[:n]
    return result
