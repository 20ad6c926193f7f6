"""Introductory scripts of keras.io; only the lines that wrap the model are new."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep

GENERATOR = np.random.Generator(np.random.PCG64(0))
CLASSES = GENERATOR.integers(0, 4, 160)
PICTURES = (GENERATOR.random((160, 12, 12, 1)) + CLASSES[:, None, None, None]).astype("float32") / 4
ONE_HOT = keras.utils.to_categorical(CLASSES, 4)


def convnet():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input(shape=(12, 12, 1)),
            layers.Conv2D(4, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    return model


def test_the_simple_convnet(capsys):
    """One input array, one-hot targets, a part held out, and the score by its positions."""
    digests = set()
    for devices in (1, 2):
        model = lockstep.wrap(convnet(), devices=devices, shards=2)
        model.fit(PICTURES, ONE_HOT, batch_size=128, epochs=2, validation_split=0.1)
        score = model.evaluate(PICTURES, ONE_HOT, verbose=0)
        print("Test loss:", score[0])
        print("Test accuracy:", score[1])
        loss, accuracy = model.evaluate(PICTURES, ONE_HOT, verbose=2)
        assert [loss, accuracy] == score
        assert (np.argmax(model.predict(PICTURES[:5]), axis=1) < 4).all()
        digests.add(model.digest())
        model.close()
    assert len(digests) == 1
    assert "val_accuracy: " in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own, when it saves
def test_the_guide_to_several_gpus(tmp_path):
    """Functions that make the model and the data, ModelCheckpoint, and a restart from the newest file."""
    folder = tmp_path / "ckpt"
    folder.mkdir()

    def make_or_restore_model():
        checkpoints = sorted(folder.glob("*.keras"))
        return keras.models.load_model(checkpoints[-1]) if checkpoints else convnet()

    def run_training(epochs):
        model = lockstep.wrap(make_or_restore_model(), devices=1, shards=2)
        callbacks = [keras.callbacks.ModelCheckpoint(filepath=str(folder / "ckpt-{epoch}.keras"), save_freq="epoch")]
        history = model.fit(
            PICTURES, ONE_HOT, epochs=epochs, callbacks=callbacks, validation_data=(PICTURES, ONE_HOT), verbose=2
        )
        assert history.history["val_loss"]
        return model

    run_training(epochs=1)
    model = run_training(epochs=1)
    assert sorted(path.name for path in folder.iterdir()) == ["ckpt-1.keras"]
    assert len(model.evaluate(PICTURES, ONE_HOT)) == 2
