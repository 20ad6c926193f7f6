"""Explains errors of a shard's forward and backward pass."""

from torch import Tensor

from lockstep.core.types import Work
from lockstep.errors import BatchError, ExactError, ModelError


def explain_error(error: Exception, work: Work, shard: int) -> None:
    """Adds a note to an error that names the shard; raises a BatchError or ExactError if Lockstep is the cause."""
    if isinstance(error, ModelError | BatchError):
        return
    text = str(error)
    if "more than 1 value per channel" in text:
        raise BatchError(
            f"Shard {shard} of step {work.step} has too few examples for batch norm, which needs more than one value "
            f"per channel: the batch has {work.num_examples} examples in {work.num_shards} shards. "
            "Use fewer shards, a larger batch, or leave the short last batch out."
        ) from error
    if "use_deterministic_algorithms(" in text:
        raise ExactError(
            "An exact run needs deterministic operations, but torch has no deterministic form of "
            f"{text.partition(' does not')[0]}. Replace it, or use lockstep.wrap(..., exact=False) to train without "
            "bit-identical results."
        ) from error
    error.add_note(f"In shard {shard} of step {work.step}.")


def check_root(root: Tensor) -> None:
    """Raises ModelError if a loss is not one number or does not depend on a trained parameter."""
    if root.ndim:
        raise ModelError(f"The loss must be a scalar. Got a tensor of shape {tuple(root.shape)}. Return its mean.")
    if not root.requires_grad:
        raise ModelError(
            "The loss does not depend on any parameter that is trained, so it has no gradient. "
            "Compute the loss from the model's outputs, outside torch.no_grad()."
        )


def build_reading_error() -> ModelError:
    """Returns the error for a model whose own loss is a mean over labels in one shard and over examples in another."""
    return ModelError(
        "The model's loss is a mean over the labels that are not -100 in one shard, and over the examples in another, "
        "but must be the same kind of mean in every shard. Write an objective that returns "
        "lockstep.Sum(model(**batch).loss * count, count), where count is the number that the loss divides by."
    )
