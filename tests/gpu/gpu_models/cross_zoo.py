"""Models of one kind of operator each, to be built for a GPU that is not there. Those that a cross build refuses say why."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def seeded(model: type[nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return model(*args).eval()


class Buffers(nn.Module):
    """A count, and a mean that follows its inputs."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean + self.count


class Cond(nn.Module):
    """Which branch runs, the values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.a(t).relu(), lambda t: self.b(t) * 2, (x,))


class Random(nn.Module):
    """Noise, and a dropout that stays on."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + torch.rand_like(x), 0.5, training=True)


class Float8(nn.Module):
    """What a quantized layer does around its product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
        rounded = (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
        return F.linear(rounded, self.weight)


class Scaled(nn.Module):
    """A product of numbers of eight bits, each side with its scale."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(32, 64)
        scale = weight.abs().amax() / 448
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("weight_scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax().float().clamp(min=1e-6) / 448
        rounded = (x.float() / scale).to(torch.float8_e4m3fn)
        return torch._scaled_mm(rounded, self.weight.t(), scale, self.weight_scale, out_dtype=torch.bfloat16)


class Convolutions(nn.Module):
    """In one and two dims, grouped, dilated, transposed; norms and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=16), nn.BatchNorm2d(16))
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.line = nn.Conv1d(8, 8, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.second(self.first(x)))
        y = F.interpolate(y, scale_factor=2, mode="bilinear")
        return self.line(F.adaptive_avg_pool2d(y, (4, 8)).flatten(2))


class Embeddings(nn.Module):
    """Looked up, in bags, and written by place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(100, 16), nn.EmbeddingBag(100, 16, mode="mean")

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts = torch.zeros(100, dtype=torch.float32, device=ids.device)
        counts = counts.index_add(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.float32))
        return self.table(ids), self.bag(ids), counts


class Order(nn.Module):
    """Top-k, sorted, running sums, the last and the largest."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, places = x.topk(4, dim=-1)
        running = x.cumsum(-1) + x.cummax(-1).values
        return values, x.gather(-1, places), running, x.sort(-1).values


class Attention(nn.Module):
    """Causal; with a mask; of grouped heads; of one query; in a size that is no multiple of 8."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q = x.unflatten(-1, (8, 64)).transpose(1, 2)
        k = q[:, :2].contiguous()
        mask = q[:, :1] @ q[:, 1:2].transpose(-1, -2)
        causal = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        masked = F.scaled_dot_product_attention(q, q, q, attn_mask=mask > 0)
        biased = F.scaled_dot_product_attention(q, q, q, attn_mask=mask.to(q.dtype))
        grouped = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        single = F.scaled_dot_product_attention(q[:, :, -1:], q, q)
        odd = F.scaled_dot_product_attention(q[..., :20], q[..., :20], q[..., :20])
        return causal, masked, biased, grouped, single, odd


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Products(nn.Module):
    """Sums of products in several spellings, a norm of a matrix, a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.einsum("bhd,hde->bhe", x, self.weight)
        z = torch.baddbmm(x.transpose(0, 1), x.transpose(0, 1), self.weight)
        return y + z.transpose(0, 1), torch.fft.rfft(x, dim=-1).abs()


class Chosen(nn.Module):
    """How many it gives, the values decide."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].cumsum(0)


@torch.library.custom_op("cross_zoo::clipped", mutates_args=())
def clipped(x: Tensor, limit: float) -> Tensor:
    return x.clamp(-limit, limit)


@clipped.register_fake
def _(x: Tensor, limit: float) -> Tensor:
    return torch.empty_like(x)


class Custom(nn.Module):
    """An operator of Python's, without a C shim."""

    def forward(self, x: Tensor) -> Tensor:
        return clipped(x * 2, 0.5) + 1


@torch.library.custom_op("cross_zoo::shimmed", mutates_args=())
def shimmed(x: Tensor) -> Tensor:
    return x.cos()


@shimmed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def declare_shim() -> None:
    """As who ships a library with a C shim for Inductor would."""
    from torch._inductor import config

    name = "aoti_torch_{}_cross_zoo_shimmed(AtenTensorHandle x, AtenTensorHandle* ret0)"
    shims: Any = config.aot_inductor.custom_ops_to_c_shims
    shims[torch.ops.cross_zoo.shimmed.default] = [f"AOTITorchError {name.format(kind)}" for kind in ("cpu", "cuda")]


class Shimmed(nn.Module):
    """An operator that has a C shim, which a bundle does not rely on."""

    def forward(self, x: Tensor) -> Tensor:
        return shimmed(x + 1) * 2


class Loops(nn.Module):
    """How often, the values decide."""

    def forward(self, x: Tensor) -> Tensor:
        def smaller(count: Tensor, y: Tensor) -> Tensor:
            return (count < 5) & (y.abs().max() < 100)

        def doubled(count: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, y * 2

        count = torch.zeros((), dtype=torch.int64, device=x.device)
        return torch._higher_order_ops.while_loop(smaller, doubled, (count, x + 1))[1]


class Branches(nn.Module):
    """Does something else on a GPU, in the branch that is not taken."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t.half().float() if t.is_cuda else t * 2, (x,))


class Asks(nn.Module):
    """Does something else on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.half().float() + 1 if x.is_cuda else x + 1


class Casts(nn.Module):
    """Computes in bfloat16 on a GPU alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.layer(x).float()


class Stays(nn.Module):
    """Gives a tensor that it makes in host memory, wherever it is."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, torch.arange(x.shape[0])


class Translates(nn.Module):
    """torch's own transformer: its attention has another layout on a GPU than on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(64, 4, 1, 1, 128, batch_first=True)

    def forward(self, x: Tensor, padded: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        masks = {"src_key_padding_mask": padded, "memory_key_padding_mask": padded}
        return self.layers(x, x, tgt_mask=mask, tgt_is_causal=True, **masks)


def translates() -> nn.Module:
    return seeded(Translates)


def buffers() -> nn.Module:
    return seeded(Buffers)


def cond() -> nn.Module:
    return seeded(Cond)


def random() -> nn.Module:
    return seeded(Random)


def float8() -> nn.Module:
    return seeded(Float8)


def scaled() -> nn.Module:
    return seeded(Scaled)


def shimmed_model() -> nn.Module:
    declare_shim()
    return seeded(Shimmed)


def loops() -> nn.Module:
    return seeded(Loops)


def branches() -> nn.Module:
    return seeded(Branches)


def convolutions() -> nn.Module:
    return seeded(Convolutions)


def embeddings() -> nn.Module:
    return seeded(Embeddings)


def order() -> nn.Module:
    return seeded(Order)


def attention() -> nn.Module:
    return seeded(Attention)


def recurrent() -> nn.Module:
    return seeded(Recurrent)


def products() -> nn.Module:
    return seeded(Products)


def chosen() -> nn.Module:
    return seeded(Chosen)


def custom() -> nn.Module:
    return seeded(Custom)


def asks() -> nn.Module:
    return seeded(Asks)


def casts() -> nn.Module:
    return seeded(Casts)


def stays() -> nn.Module:
    return seeded(Stays)
