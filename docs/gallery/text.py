"""A text classifier that is called with several tensors by name.

Finding: nothing is guessed from lengths. `per_sample` names the arguments with one entry per sample; all samples share the
others. Without it an error shows what to write. (Models of transformers need no `per_sample` for what a tokenizer returns.)
"""

import torch
from torch import nn

import come


class Reader(nn.Module):
    """Random weights; called as the models of transformers are."""

    def __init__(self):
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(100, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, input_ids, attention_mask, bias):
        """Classify by the mean of the words that are no padding."""
        h = self.words(input_ids)
        h = self.norm(h + self.attend(h, h, h, key_padding_mask=attention_mask == 0, need_weights=False)[0])
        mean = (h * attention_mask[..., None]).sum(dim=1) / attention_mask.sum(dim=1, keepdim=True)
        return {"logits": self.head(mean) + bias}


torch.manual_seed(0)
model = Reader().eval()
mask = (torch.arange(12) < torch.tensor([[12], [7], [3], [9]])).long()
batch = {"input_ids": torch.randint(100, (4, 12)), "attention_mask": mask, "bias": torch.zeros(4)}  # 4 classes, 4 texts

try:
    come.adapt(model)(**batch)
    raise AssertionError("it guessed which arguments have one entry per sample")
except come.InputError as error:
    print(error)
classifier = come.adapt(model, per_sample=("input_ids", "attention_mask"))
assert classifier(**batch).shape == (4, 4)
