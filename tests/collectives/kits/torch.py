"""PyTorch: tensors, and the parameters of a module."""

import torch

from collectives.kit import Kit


def slope(param):
    (param * param).sum().backward()
    return param.grad


def kit(params):
    def value(tensor):
        return tensor.detach().numpy()

    return Kit(
        torch.tensor, params, value, slope, lambda tensor: str(tensor.device), lambda: ["cpu", "cpu"], in_place=True
    )


KITS = {
    "torch": kit(lambda value: torch.tensor(value, requires_grad=True)),
    "torch.nn": kit(lambda value: torch.nn.Parameter(torch.tensor(value))),
}
