"""A small vision transformer of the transformers library with random weights; no hub access."""

import torch
from torch import Tensor, nn

try:
    from transformers import ViTConfig, ViTModel
except ImportError as error:
    raise ImportError("transformers is not installed; pip install transformers") from error


def build(
    *, layers: int = 4, hidden: int = 192, heads: int = 3, image: int = 64, patch: int = 8, seed: int = 0
) -> nn.Module:
    """A ViT in eval mode; the same arguments give the same weights."""
    torch.manual_seed(seed)
    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
        image_size=image,
        patch_size=patch,
        attn_implementation="sdpa",
    )
    return ImageEncoder(ViTModel(config)).eval()


class ImageEncoder(nn.Module):
    """Hands on a plain dict: a ViT answers with a class of transformers, which a server should not need."""

    def __init__(self, vit: ViTModel) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """`last_hidden_state` [batch, patches + 1, hidden] and `pooler_output` [batch, hidden] of [batch, 3, h, w]."""
        out = self.vit(pixel_values=pixel_values)
        return {"last_hidden_state": out.last_hidden_state, "pooler_output": out.pooler_output}
