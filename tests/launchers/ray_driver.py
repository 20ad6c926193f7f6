"""Runs the script under one of Ray Train's trainers: `python ray_driver.py TorchTrainer FOLDER`."""

import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer
from ray.train.torch import TorchTrainer


def choose(name):
    if name == "JaxTrainer":
        from ray.train.v2.jax import JaxTrainer

        return JaxTrainer
    return {"TorchTrainer": TorchTrainer, "TensorflowTrainer": TensorflowTrainer}[name]


def work(config):
    from launchers.train import train

    train(**config)


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    config = (
        {"checkpoint": f"{folder}/checkpoint", "die": f"{folder}/died", "pause": 0.1} if name == "TorchTrainer" else {}
    )
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    choose(name)(
        work,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=1)),
    ).fit()
