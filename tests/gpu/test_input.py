"""Input on the GPU: prepared ahead on another stream, and the same bits. Skipped where there is no GPU."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import lockstep
from lockstep.backends.torch import inputs
from lockstep.data import arrays

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GENERATOR = np.random.Generator(np.random.PCG64(2))
X = GENERATOR.standard_normal((317, 97)).astype(np.float32)
Y = GENERATOR.integers(0, 10, 317)
DEVICE = torch.device("cuda:0")


def noisy(x, y):
    return x + np.float32(random.random()), y


CHAINS = {
    "gathered": lambda: arrays(X, Y).shuffle(1),
    "made": lambda: arrays(X, Y).shuffle(1).map(noisy, random=True),
}


def fitted(data, devices, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(97, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with lockstep.wrap(
        net, optimizer, nn.CrossEntropyLoss(), devices=["cuda:0"] * devices, shards=4, seed=1
    ) as trainer:
        assert len(trainer.devices) == devices
        trainer.fit(data, epochs=2, verbose=0, **options)
        return trainer.digest(), trainer.evaluate(data, batch_size=61)["loss"].hex()


@pytest.mark.parametrize("kind", CHAINS)
def test_prepared_ahead_is_the_same(kind):
    one = fitted(CHAINS[kind]().batch(61), 1)
    for devices in (1, 2, 3):
        for ahead in (1, 3):
            assert fitted(CHAINS[kind]().batch(61).prefetch(ahead), devices) == one, (devices, ahead)


def test_a_pipeline_is_read_like_its_arrays():
    assert fitted((X, Y), 1, batch_size=61)[0] == fitted(arrays(X, Y).shuffle(1).batch(61).prefetch(2), 1)[0]


def test_a_staged_piece_lies_on_the_gpu_in_buffers_of_its_own():
    piece = (X[3:10, ::2], {"y": Y[:7], "names": ["a"] * 7}, 0.5)
    staged = inputs.stage(piece, DEVICE)
    assert isinstance(staged[0], inputs.StagedTensor)
    put = inputs.copy_to_device(staged, DEVICE)
    assert put[0].is_contiguous()
    assert put[0].data_ptr() % 512 == 0
    assert put[0].device == DEVICE
    np.testing.assert_array_equal(put[0].cpu().numpy(), X[3:10, ::2])
    np.testing.assert_array_equal(put[1]["y"].cpu().numpy(), Y[:7])
    assert put[1]["y"].dtype == torch.int64
    assert put[1]["names"] == ["a"] * 7
    assert put[2] == 0.5
    assert inputs.copy_to_device(staged, DEVICE)[0].data_ptr() == put[0].data_ptr()  # not copied again


def test_a_cpu_takes_the_piece_as_it_is():
    piece = (X, Y)
    assert inputs.stage(piece, torch.device("cpu")) is piece
