"""A word language model with truncated backpropagation: each batch starts from the hidden state of the one before.

The text is cut into as many columns as a batch has examples; an example of a batch is the next 24 words of its column.
The objective returns the network's last hidden state as `lockstep.Carried`. `trainer.step(batch).carried` is the state
of the whole batch, on the same bits for any number of devices, and no gradient flows back through it.
"""

import numpy as np
import torch
from torch import nn

import lockstep

COLUMNS, LENGTH = 40, 24

# Stories of one hero each, longer than a batch: "the dog sees a boat . the dog finds the tree . ..."
random = np.random.default_rng(0)
NOUNS, VERBS = ["dog", "cat", "bird", "river", "king", "tree", "boat"], ["sees", "likes", "finds"]


def write_story(num_sentences=10):
    hero = random.choice(NOUNS)
    for _ in range(num_sentences):
        yield from ("the", hero, random.choice(VERBS), random.choice(["the", "a"]), random.choice(NOUNS), ".")


words = [str(word) for _ in range(400) for word in write_story()]
vocabulary = sorted(set(words))
numbers = np.searchsorted(vocabulary, words)
text = torch.tensor(numbers[: len(numbers) // COLUMNS * COLUMNS]).reshape(COLUMNS, -1)  # (40, length of a column)


class WordModel(nn.Module):
    def __init__(self, width=48, layers=2):
        super().__init__()
        self.words = nn.Embedding(len(vocabulary), width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, len(vocabulary))
        self.state_shape = layers, width

    def forward(self, words, hidden, cell):
        # A batch's state has the examples on axis 0, (examples, layers, width); that of an LSTM has them on axis 1.
        state = hidden.transpose(0, 1).contiguous(), cell.transpose(0, 1).contiguous()
        outputs, (hidden, cell) = self.lstm(self.words(words), state)
        return self.head(outputs), hidden.transpose(0, 1), cell.transpose(0, 1)


@lockstep.objective
def predict_next(model, batch):
    logits, hidden, cell = model(batch["words"], *batch["state"])
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), batch["next"])
    return lockstep.Carried(loss, (hidden, cell))


torch.manual_seed(0)
model = WordModel()
trainer = lockstep.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), predict_next, devices=["cpu", "cpu"])
for epoch in range(3):
    state = torch.zeros(COLUMNS, *model.state_shape), torch.zeros(COLUMNS, *model.state_shape)
    losses = []
    for start in range(0, text.shape[1] - LENGTH - 1, LENGTH):
        words, following = text[:, start : start + LENGTH], text[:, start + 1 : start + LENGTH + 1]
        logs = trainer.step({"words": words, "next": following, "state": state})
        state = logs.carried
        losses.append(logs["loss"])
    print(f"epoch {epoch + 1}: perplexity {np.exp(np.mean(losses)):.2f}")
print(trainer.digest())
