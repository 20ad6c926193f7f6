"""Compares a port with the plain loop that it came from, and with itself on several devices."""

import hashlib

import numpy as np

SHARDS = 3
DEVICE_COUNTS = (1, 2, 3)


def check_port(plain, port, tolerance=0.0):
    """Checks the arrays that both return.

    `plain()` is the script as it was. `port(devices, shards)` is the script with Lockstep; with one shard on one device
    it gives the plain loop's bits, unless the framework compiles it otherwise: then `tolerance` says how near. With
    several shards every number of devices gives the same bits.
    """
    expected, found = plain(), port(["cpu"], 1)
    assert list(expected) == list(found)
    for name, array in expected.items():
        if tolerance:
            np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)
        else:
            assert found[name].tobytes() == array.tobytes(), name
    digests = {count: compute_digest(port(["cpu"] * count, SHARDS)) for count in DEVICE_COUNTS}
    assert len({*digests.values()}) == 1, digests
    assert digests[1] != compute_digest(found)  # it was another computation


def compute_digest(arrays):
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
