"""A small transformer encoder with random weights: token ids and a mask in, one vector a row out."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)


def build(
    *, layers: int = 4, width: int = 256, heads: int = 4, vocab: int = 8192, longest: int = 512, seed: int = 0
) -> nn.Module:
    """An encoder in eval mode; the same arguments give the same weights."""
    torch.manual_seed(seed)
    return Encoder(layers=layers, width=width, heads=heads, vocab=vocab, longest=longest).eval()


class Encoder(nn.Module):
    """Token and position embeddings, pre-norm blocks, and the mean over the positions that the mask keeps."""

    def __init__(self, *, layers: int, width: int, heads: int, vocab: int, longest: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[batch, width] from ids and mask of [batch, seq], int64; the mask is 1 for tokens and 0 for padding."""
        kept = attention_mask.bool()
        x = self.token(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x, kept[:, None, None, :])
        weight = kept.unsqueeze(-1).to(x.dtype)
        return (self.norm(x) * weight).sum(1) / weight.sum(1).clamp(min=1)


class Block(nn.Module):
    """Self-attention and a feed-forward step, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """The next x, [batch, seq, width]; `kept` is [batch, 1, 1, seq], true where attention may look."""
        x = x + self.attend(self.norm_attention(x), kept)
        return x + self.feed(self.norm_feed(x))

    def attend(self, x: Tensor, kept: Tensor) -> Tensor:
        # nn.MultiheadAttention would bring its nested-tensor fast path, which does not export.
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=kept)
        return self.out(mixed.transpose(1, 2).flatten(2))
