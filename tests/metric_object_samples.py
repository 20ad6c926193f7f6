"""Metric objects as people write them: exact AUROC and macro F1, in numpy alone."""

import numpy as np


def numpy_of(value):
    """Any framework's array in the CPU's memory as numpy."""
    return value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value)


def auroc(scores, labels):
    """The probability that a positive example scores higher than a negative one."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    pairs = (positive[:, None] > negative).mean() + (positive[:, None] == negative).mean() / 2
    return float(pairs)


def macro_f1(predicted, labels, num_classes):
    """The mean over the classes of F1."""
    values = []
    for label in range(num_classes):
        hits = ((predicted == label) & (labels == label)).sum()
        values.append(2 * hits / max((predicted == label).sum() + (labels == label).sum(), 1))
    return float(np.mean(values))


class Auroc:
    """Of the second class against the first; it keeps everything, as torchmetrics' does."""

    def __init__(self):
        self.scores, self.labels = [], []

    def update(self, outputs, targets):
        outputs = numpy_of(outputs)
        self.scores.append(outputs[:, 1] - outputs[:, 0])
        self.labels.append(numpy_of(targets))

    def compute(self):
        return auroc(np.concatenate(self.scores), np.concatenate(self.labels))

    def reset(self):
        self.scores, self.labels = [], []


class MacroF1:
    """Of counts; it gives two values by name."""

    def __init__(self, num_classes):
        self.num_classes = num_classes
        self.reset()

    def update(self, outputs, targets):
        predicted, labels = numpy_of(outputs).argmax(1), numpy_of(targets).astype(int)
        np.add.at(self.counts, (predicted, labels), 1)

    def compute(self):
        hits = np.diag(self.counts)
        sizes = self.counts.sum(0) + self.counts.sum(1)
        return {"f1": np.mean(2 * hits / np.maximum(sizes, 1)), "correct": hits.sum() / self.counts.sum()}

    def reset(self):
        self.counts = np.zeros((self.num_classes, self.num_classes), np.int64)


class Order:
    """A number in which every row of every batch has a place of its own."""

    def __init__(self):
        self.total, self.rows = 0.0, 0

    def update(self, outputs, targets):
        outputs, targets = numpy_of(outputs), numpy_of(targets)
        places = np.arange(self.rows, self.rows + len(outputs)) + 1.0
        self.total += float((outputs.astype("float64") * places[:, None]).sum() + (targets * places).sum())
        self.rows += len(outputs)

    def compute(self):
        return self.total / self.rows

    def reset(self):
        self.total, self.rows = 0.0, 0
