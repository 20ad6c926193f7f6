"""What has no value to add, framework by framework, and what is particular to one."""

import os

import numpy as np
import pytest

import lockstep
from lockstep.errors import BatchError

BACKENDS = os.environ.get("LOCKSTEP_BACKENDS", "numpy,torch").split(",")


@pytest.mark.skipif("torch" not in BACKENDS, reason="another environment has this framework")
class TestTorch:
    def test_a_graph_is_refused(self):
        import torch

        weight = torch.ones(2, requires_grad=True)
        with pytest.raises(BatchError, match=r"Got a tensor with a graph behind it\. Give its \.detach\(\)"):
            lockstep.allreduce([weight * 2, weight * 3])

    def test_what_is_frozen_stays_frozen_and_a_result_becomes_a_leaf(self):
        import torch

        weight = torch.ones(2, requires_grad=True)
        for frozen, trained, made in lockstep.replicate([torch.ones(2), weight, weight * 2], 2):
            assert not frozen.requires_grad
            assert trained.requires_grad
            assert made.requires_grad
            assert made.is_leaf

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

        with pytest.raises(BatchError, match=r"Got a tensor inside of a tf\.function\. Call it outside"):
            tf.function(lambda a: lockstep.allreduce([a, a]), autograph=False)(tf.ones(2))

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
