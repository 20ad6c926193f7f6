import pytest
import torch

from forked_workers import TORCH_WORKER


@pytest.fixture(autouse=True, scope="module")
def forked_workers(templates):
    """Workers are copies of a process that has imported the packages, but has made no model of them."""
    with templates((*TORCH_WORKER, "transformers.modeling_utils")).in_use():
        yield


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
