"""A loss of your own: guess the masked tokens of sequences, an unequal number of them in every example.

The objective sees one shard and gives a Sum: the loss summed over the masked tokens, and how many there are.
Both are added over all shards and divided once, so the loss is the mean over the masked tokens of the whole batch.
"""

import numpy as np
import torch
from torch import nn

import lockstep

VOCABULARY, LENGTH, MASK = 16, 12, 0

# Sequences that count upwards and start again after the last token; token 0 is the mask.
random = np.random.default_rng(0)
tokens = 1 + (random.integers(0, VOCABULARY - 1, (2048, 1)) + np.arange(LENGTH)) % (VOCABULARY - 1)  # (2048, 12)
masked = random.random(tokens.shape) < 0.15
data = {"inputs": np.where(masked, MASK, tokens), "targets": tokens, "masked": masked}


class Guesser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 128, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, inputs):
        return self.head(self.block(self.tokens(inputs) + self.places))


@lockstep.objective
def guess(model, batch):
    logits, weight = model(batch["inputs"]), batch["masked"]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
    right = logits.argmax(-1) == batch["targets"]
    loss = lockstep.Sum((losses * weight).sum(), weight.sum())
    return loss, {"accuracy": ((right & weight).sum(), weight.sum())}


torch.manual_seed(0)
model = Guesser()
trainer = lockstep.wrap(model, torch.optim.AdamW(model.parameters(), lr=5e-3), guess, devices=["cpu", "cpu"])
trainer.fit(data, epochs=8, batch_size=256)
print(trainer.digest())
