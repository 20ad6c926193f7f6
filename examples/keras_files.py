"""A folder of Keras's own checkpoints, ckpt-1.keras, ckpt-2.keras …, begun by Keras alone and continued by Lockstep."""

import sys
from pathlib import Path

import keras
from keras import layers

import lockstep
from lockstep.datasets import digits


def get_compiled_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), layers.Dense(128, activation="relu"), layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def make_or_restore_model():
    """The model in the newest file, by its number, and that number; or a new model, and 0."""
    saved = {int(path.stem.removeprefix("ckpt-")): path for path in Path("ckpt").glob("ckpt-*.keras")}
    newest = max(saved, default=0)
    return (keras.models.load_model(saved[newest]) if saved else get_compiled_model()), newest


(x, y), test = digits()
save = keras.callbacks.ModelCheckpoint("ckpt/ckpt-{epoch}.keras")

model, done = make_or_restore_model()
model.fit(x, y, batch_size=256, epochs=done + 2, initial_epoch=done, callbacks=[save], verbose=2)

model, done = make_or_restore_model()
trainer = lockstep.wrap(model, devices=sys.argv[1:] or None)
trainer.fit(x, y, batch_size=256, epochs=done + 2, initial_epoch=done, callbacks=[save])
print(trainer.evaluate(*test))
print(sorted(path.name for path in Path("ckpt").iterdir()))  # Keras alone can go on from these
print(trainer.digest())
