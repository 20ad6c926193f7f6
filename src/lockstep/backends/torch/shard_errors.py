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
            f"Batch norm needs more than one value per channel in every shard. Shard {shard} of step {work.step} "
            f"has too few examples: {work.num_examples} in {work.num_shards} shards. "
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
        raise ModelError(f"A loss must be one number. Got shape {tuple(root.shape)}. Return its mean.")
    if not root.requires_grad:
        raise ModelError(
            "A loss must depend on parameters that are trained. Got one that has no gradient. "
            "Compute it from the model's outputs, outside torch.no_grad()."
        )


def build_reading_error() -> ModelError:
    """Returns the error for a model whose own loss is a mean over labels in one shard and over examples in another."""
    return ModelError(
        "The model's loss must be the same kind of mean in every shard. It is a mean over other things in one shard "
        "than in another: over its labels that are not -100, or over its examples. Write an objective that returns "
        "lockstep.Sum(model(**batch).loss * count, count) with the count that you mean."
    )
