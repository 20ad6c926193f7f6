"""How toynet's losses are weighed: what core needs to know of each."""

from functools import partial

import toynet

from lockstep.core.criterion import Criterion
from lockstep.core.named_metrics import LossTraits
from lockstep.core.objective import Objective
from lockstep.core.target_kind import Labels
from lockstep.core.weighing import Weighing
from lockstep.errors import ModelError
from lockstep_toynet import array_ops

WEIGHING = Weighing(array_ops, "weights.astype(float)")
OWN = (toynet.CrossEntropy, toynet.SquaredError)


def choose_term(loss):
    """Returns the function (model, shard's batch, share) -> Term for the loss that was given to `wrap`."""
    if isinstance(loss, Objective):
        return partial(WEIGHING.weigh_objective, loss)
    if not callable(loss):
        raise ModelError(f"A loss is one of toynet, a function or a lockstep.objective. Got {loss!r}.")
    criterion = OwnCriterion(loss) if isinstance(loss, OWN) else Criterion(loss)
    return partial(WEIGHING.compare, criterion)


def find_traits(loss):
    """Returns what the named metrics need to know of the loss."""
    return LossTraits(getattr(loss, "ignored", None))


class OwnCriterion(Criterion):
    """A loss of toynet, of which it is known by what its mean divides. Of a function, `Criterion` assumes nothing."""

    adds_nothing_uncounted = True

    @property
    def is_sum(self):
        return self.function.reduction == "sum"

    def find_labels(self, outputs, targets):
        if isinstance(self.function, toynet.CrossEntropy):
            return Labels(outputs.shape[1], self.function.ignored)
        return None

    def compute_each(self, outputs, targets):
        return self.function.each(outputs, targets)

    def compute_sum(self, outputs, targets):
        return self.function.each(outputs, targets).sum()

    def count(self, targets):
        counts = isinstance(self.function, toynet.CrossEntropy) and self.function.ignored is not None
        return self.function.count(targets) if counts else None
