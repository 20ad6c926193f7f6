"""The backend for toynet: what the entry point `toynet = lockstep_toynet` of the group `lockstep.backends` names."""

from lockstep_toynet.backend import ToynetBackend

joins = True  # whether processes that a launcher started can train together
compiles = False  # whether wrap(compile=True) is supported


def available():
    return []  # no accelerators: replicas are on the CPU


def name(device):
    return str(device)


def initial_seed():
    return 0


def variables(devices):
    return {}


def adopt(recipe):
    return recipe


def open(recipe, devices):
    return ToynetBackend(recipe, devices)


def processes(devices):
    return [[device] for device in devices]  # one process for each
