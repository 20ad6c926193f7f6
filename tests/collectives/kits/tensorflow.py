"""TensorFlow: tensors, and variables to train."""

import tensorflow as tf

from collectives.kit import Kit


def slope(param):
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(param * param)
    return tape.gradient(total, param)


def devices():
    found = [device.name for device in tf.config.list_logical_devices("CPU")]
    return (found * 2)[:2]


def place(array):
    return array.device[array.device.index("/device") :]


def kit(array, in_place):
    return Kit(array, tf.Variable, lambda tensor: tensor.numpy(), slope, place, devices, in_place)


KITS = {"tensorflow": kit(tf.constant, in_place=False), "tensorflow.Variable": kit(tf.Variable, in_place=True)}
