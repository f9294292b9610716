"""BERT-base with seeded random weights: the model of the GPU start figures (bench/bert.yaml)."""

from torch import Tensor, manual_seed, nn


def build(layers: int = 12, width: int = 768, heads: int = 12) -> nn.Module:
    """The encoder in eval mode, 108 M parameters at the default size; the last hidden state of ids and mask."""
    from transformers import BertConfig, BertModel

    manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Encoder(BertModel(config, add_pooling_layer=False)).eval()


class Encoder(nn.Module):
    """[batch, seq] ids and mask of int64 -> [batch, seq, width]."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden
