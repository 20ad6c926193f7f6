"""The JAX models that are measured, in flax."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp


class MLP(nn.Module):
    """784-256-256-10."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = x.reshape(len(x), -1)
        for width in (256, 256):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class LeNet(nn.Module):
    """LeNet-5 for 28×28 images."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.max_pool(nn.relu(nn.Conv(6, (5, 5))(x)), (2, 2), (2, 2))
        x = nn.max_pool(nn.relu(nn.Conv(16, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class Basic(nn.Module):
    """ResNet's basic block."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        def norm(y: Any) -> Any:
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)

        y = nn.relu(norm(nn.Conv(self.width, (3, 3), self.stride, use_bias=False)(x)))
        y = norm(nn.Conv(self.width, (3, 3), use_bias=False)(y))
        if self.stride > 1:
            x = norm(nn.Conv(self.width, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """ResNet-18 with a 3×3 stem and no pooling before the end."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Conv(64, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for stage in range(4):
            for block in range(2):
                x = Basic(64 << stage, 2 if stage and not block else 1)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


class Arrays(nn.Module):
    """As many arrays as ResNet-18 has, of one number each: a step that is nearly all the host's."""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        scale = sum(self.param(f"scale{index}", nn.initializers.ones, ()) for index in range(60))
        for index in range(40):
            mean = self.variable("batch_stats", f"mean{index}", jnp.zeros, ())
            mean.value = 0.9 * mean.value + 0.1 * x.mean()
        return nn.Dense(10)(x.reshape(len(x), -1)) * scale


MODULES = {"mlp": MLP, "lenet": LeNet, "resnet18": ResNet18, "arrays": Arrays, "shards": MLP}
