"""What has no value to add, framework by framework, and what is particular to one."""

import os

import numpy as np
import pytest

import lockstep
from lockstep.errors import BatchError

BACKENDS = os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")


class TestNumpy:
    def test_a_read_only_array_is_refused_before_anything_is_written(self):
        given = [np.ones(2), np.ones(2)]
        given[1].flags.writeable = False
        with pytest.raises(BatchError, match=r"Got an array that is read-only\. Give its \.copy\(\)"):
            lockstep.allreduce(given)
        assert given[0].tolist() == [1, 1]


@pytest.mark.skipif("torch" not in BACKENDS, reason="another environment has this framework")
class TestTorch:
    def test_a_graph_is_refused(self):
        import torch

        weight = torch.ones(2, requires_grad=True)
        with pytest.raises(BatchError, match=r"Got a tensor with a graph behind it\. Give its \.detach\(\)"):
            lockstep.allreduce([weight * 2, weight * 3])

    def test_elements_that_share_memory_are_refused_before_anything_is_written(self):
        import torch

        weight = torch.ones(2, requires_grad=True)
        given = [torch.ones(2), *torch.autograd.grad(weight.sum(), weight)]
        with pytest.raises(BatchError, match=r"Got a tensor whose elements share memory, .* Give its \.clone\(\)"):
            lockstep.allreduce(given)
        assert given[0].tolist() == [1, 1]
        (alone,) = lockstep.allreduce([torch.ones(1, 2).as_strided((1, 2), (0, 1))])  # an axis of one entry
        assert alone.tolist() == [[1, 1]]

    def test_a_tensor_without_values_is_refused(self):
        import torch

        with pytest.raises(BatchError, match=r"^split needs arrays with values\. Got a tensor on the device meta"):
            lockstep.split(torch.ones(2, device="meta"), 2)

    def test_what_is_frozen_stays_frozen_and_a_result_becomes_a_leaf(self):
        import torch

        weight = torch.ones(2, requires_grad=True)
        for frozen, trained, made in lockstep.replicate([torch.ones(2), weight, weight * 2], 2):
            assert not frozen.requires_grad
            assert trained.requires_grad
            assert made.requires_grad
            assert made.is_leaf

    def test_plain_tensors_become_trainable_if_none_is_yet(self):
        import torch

        for weight, index in lockstep.replicate([torch.ones(2), torch.arange(2)], 2):
            assert weight.requires_grad
            assert not index.requires_grad
        (frozen,) = lockstep.replicate(torch.nn.Parameter(torch.ones(2), requires_grad=False), 1)
        assert not frozen.requires_grad

    def test_a_piece_has_memory_of_its_own(self):
        import torch

        x = torch.arange(8.0).reshape(2, 4).t()
        for piece in (*lockstep.split(x, 2), *lockstep.split(x, 1)):
            assert piece.is_contiguous()
            assert piece.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.skipif("jax" not in BACKENDS, reason="another environment has this framework")
class TestJax:
    def test_a_traced_array_is_refused(self):
        import jax

        with pytest.raises(BatchError, match=r"Got a traced array\. Call it outside of jax\.jit"):
            jax.jit(lambda a: lockstep.allreduce([a, a]))(jax.numpy.ones(2))
        for call in (lockstep.replicate, lockstep.split):
            with pytest.raises(BatchError, match=rf"^{call.__name__} needs arrays with values\. Got a traced array"):
                jax.jit(lambda a, call=call: call(a, 2)[0])(jax.numpy.ones(2))

    def test_a_description_is_refused(self):
        import jax

        with pytest.raises(BatchError, match=r"Got a ShapeDtypeStruct\. Give a jax\.Array"):
            lockstep.replicate(jax.ShapeDtypeStruct((2,), "float32"), 2)

    def test_a_donated_replica_takes_no_other_with_it(self):
        import jax

        weight = jax.numpy.ones(4)
        first, second = lockstep.replicate(weight, 2)
        jax.jit(lambda w: w + 1, donate_argnums=0)(first)
        assert not weight.is_deleted()
        assert not second.is_deleted()
        assert np.asarray(second).tolist() == [1, 1, 1, 1]

    def test_a_sum_given_away_takes_no_other_with_it(self):
        import jax

        first, second = lockstep.allreduce([jax.numpy.ones(4), jax.numpy.ones(4)])
        jax.jit(lambda w: w + 1, donate_argnums=0)(first)
        assert np.asarray(second).tolist() == [2, 2, 2, 2]


@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="another environment has this framework")
class TestTensorflow:
    def test_a_symbolic_tensor_is_refused(self):
        import tensorflow as tf

        with pytest.raises(BatchError, match=r"Got a tensor inside a tf\.function\. Call it outside"):
            tf.function(lambda a: lockstep.allreduce([a, a]), autograph=False)(tf.ones(2))

    def test_keras_variables_and_ragged_tensors_are_refused(self):
        import keras
        import tensorflow as tf

        for given in (keras.Variable([1.0, 2.0]), tf.ragged.constant([[1.0], [2.0, 3.0]])):
            for call in (
                lambda: lockstep.replicate(given, 2),  # noqa: B023
                lambda: lockstep.split(given, 2),  # noqa: B023
                lambda: lockstep.allreduce([given, given]),  # noqa: B023
            ):
                with pytest.raises(BatchError, match=r"Give a tensor or a tf\.Variable, such as the \.value of a"):
                    call()

    def test_replicas_are_variables_trained_as_the_original(self):
        import tensorflow as tf

        for frozen, weight in lockstep.replicate([tf.Variable([1.0], trainable=False), tf.constant([1.0])], 2):
            assert isinstance(frozen, tf.Variable)
            assert not frozen.trainable
            assert weight.trainable

    def test_sparse_gradients_are_added_as_dense_ones(self):
        import tensorflow as tf

        def gradient(rows):
            table = tf.Variable(tf.zeros((4, 2)))
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(tf.gather(table, rows))
            return tape.gradient(total, table)

        for total in lockstep.allreduce([gradient([0, 1]), gradient([1, 3])]):
            assert total.numpy().tolist() == [[1, 1], [2, 2], [0, 0], [1, 1]]
        (alone,) = lockstep.allreduce([gradient([0, 1])])
        assert isinstance(alone, tf.Tensor)
        assert alone.numpy().tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


@pytest.mark.skipif("mxnet" not in BACKENDS, reason="another environment has this framework")
class TestMxnet:
    def test_a_recorded_array_is_refused(self):
        import mxnet as mx

        weight = mx.nd.ones((2,))
        weight.attach_grad()
        with mx.autograd.record():
            outputs = weight * 2
        with pytest.raises(BatchError, match=r"Got an array that autograd has recorded\. Give its \.detach\(\)"):
            lockstep.allreduce([outputs, outputs])
        first, second = lockstep.allreduce([weight, outputs.detach()])
        assert first.asnumpy().tolist() == second.asnumpy().tolist() == [3.0, 3.0]

    def test_a_parameter_is_refused(self):
        from mxnet import gluon

        weight = gluon.Parameter("weight", shape=(2,))
        weight.initialize()
        for call in (lambda: lockstep.replicate({"w": weight}, 2), lambda: lockstep.allreduce([weight, weight])):
            with pytest.raises(BatchError, match=r"Got a Parameter\. Give its \.data\(\) or its \.grad\(\)"):
                call()
