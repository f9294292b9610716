"""A tiny Llama of the transformers library with random weights, run as a prefill: no cache in, none out."""

import torch
from torch import Tensor, nn

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise ImportError("transformers is not installed; pip install transformers") from error


def build(
    *, layers: int = 2, hidden: int = 128, heads: int = 4, kv_heads: int = 2, vocab: int = 1024, seed: int = 0
) -> nn.Module:
    """A Llama in eval mode; the same arguments give the same weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
    )
    return Prefill(LlamaForCausalLM(config)).eval()


class Prefill(nn.Module):
    """One causal pass over whole prompts."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, seq, vocab] of prompts of one length, [batch, seq], int64."""
        return self.llama(input_ids=input_ids, use_cache=False).logits
