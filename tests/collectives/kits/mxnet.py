"""MXNet: the classic arrays, and numpy's kind under `npx.set_np()`."""

import warnings

import numpy as np

from collectives.kit import Kit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses names that numpy 1.23 is about to drop
    import mxnet as mx
    from mxnet import autograd


def slope(param):
    with autograd.record():
        total = (param * param).sum()
    total.backward()
    return param.grad


def devices():
    return ["cpu(0)", "cpu(1)"]


def classic(value):
    return mx.nd.array(value, dtype=np.asarray(value).dtype)


def modern(value):
    return mx.np.array(value, dtype=np.asarray(value).dtype)


def kit(array, **scope):
    def params(value):
        param = array(value)
        param.attach_grad()
        return param

    return Kit(
        array, params, lambda array: array.asnumpy(), slope, lambda array: str(array.ctx), devices, True, **scope
    )


KITS = {"mxnet": kit(classic), "mxnet.np": kit(modern, scope=lambda: mx.util.np_shape(True))}
