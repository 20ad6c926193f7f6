"""What is not supported, or does not fit, is refused with a message."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import lockstep
from backends.kits import jax as kit
from lockstep.backends.jax import CrossEntropy, devices, models, rng
from lockstep.errors import BatchError, DeviceError, ModelError, NonFiniteError, OptimizerError, PlanError, StateError

assert kit.module  # has made the CPU devices
LOSS = optax.softmax_cross_entropy_with_integer_labels
X, Y = np.ones((16, 6), np.float32), np.zeros(16, np.int64)


def net():
    return nnx.Linear(6, 3, rngs=nnx.Rngs(0))


def wrapped(model=None, optimizer=None, loss=LOSS, **more):
    return lockstep.wrap(model or net(), optimizer or optax.sgd(0.1), loss, shards=4, **more)


def apply_giving(outputs):
    return lambda params, x: outputs(x @ params)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X, Y[:-1]), "The arrays of a batch have different lengths, 16, 15, in"),
        (X, "cannot be used with a loss of .outputs, targets.. Give .inputs, targets."),
        ((X, np.array(["a"] * 16)), "but JAX only takes numbers"),
        (
            (X, Y, np.ones((16, 2))),
            r"There must be one example weight per example. Got weights of shape \(4, 2\) for a shard of 4",
        ),
        (
            (X, Y, 1),
            (
                r"There must be one example weight per example. Got weights of shape \(\) for a shard of 4 examples. "
                r"Give a vector"
            ),
        ),
        (
            (X, Y, jax.random.split(jax.random.key(0), 16)),
            r"The batch contains an array of random keys \(key<.*key_data",
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch, message):
    with pytest.raises(BatchError, match=message):
        wrapped().step(batch)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize(("targets", "got"), [(1, "int"), ({"y": Y}, "{'y': .*}")])
def test_targets_that_are_not_an_array_are_refused(loss, targets, got):
    with pytest.raises(BatchError, match=f"needs the targets as one array. Got {got}. Give one array"):
        wrapped(loss=loss).step((X, targets))


ODDS = np.full((16, 3), 1 / 3, np.float32)


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (
            CrossEntropy(ignore_index=2),
            ODDS,
            r"ignore_index=2 got targets of float32, .* only works with integer",
        ),
        (CrossEntropy(), ODDS[:, :2], r"shape \(4, 3\) and class probabilities of shape \(4, 2\) \(float32\)"),
        (CrossEntropy(), ODDS[:, 0], r"shape \(4, 3\) and class probabilities of shape \(4,\) \(float32\)"),
        (CrossEntropy(weights=(1.0, 2.0)), ODDS, "Class weights need one entry per class. Got 2 weights for 3 classes"),
    ],
)
def test_targets_that_do_not_fit_cross_entropy_are_refused(loss, targets, message):
    with pytest.raises(ModelError, match=message):
        wrapped(loss=loss).step((X, targets))


@pytest.mark.parametrize("outputs", [lambda z: z.sum(), lambda z: z[:1], lambda z: z.T])
def test_outputs_without_a_row_per_example_are_refused(outputs):
    trainer = wrapped((apply_giving(outputs), jnp.ones((6, 3))))
    with pytest.raises(ModelError, match=r"The model returned outputs of shape .* Return one row per example"):
        trainer.step((X, Y))


def test_an_apply_that_drops_a_variable_is_refused():
    def apply(variables, x, *, rngs, mutable):
        return x @ variables["params"]

    trainer = wrapped((apply, {"params": jnp.ones((6, 3)), "batch_stats": {"mean": jnp.zeros(3)}}))
    with pytest.raises(
        ModelError, match=r"apply must return \(outputs, variables\) when called with mutable=\['batch_stats'\]"
    ):
        trainer.step((X, Y))


@pytest.mark.parametrize(
    ("mean", "message"),
    [
        ({"mean": [jnp.ones(3)], "count": 1}, r"has added or removed the variable 'batch_stats\.count'\. Create all"),
        (
            {"mean": (jnp.ones(3),)},
            r"has changed a container of variables\. .* in the containers in which the call gets",
        ),
        (
            {"mean": [jnp.ones((1, 3))]},
            r"changed the shape of the variable 'batch_stats\.mean\.0' from \(3,\) to \(1, 3\)",
        ),
    ],
)
def test_an_apply_that_returns_other_variables_is_refused(mean, message):
    def apply(variables, x, *, mutable):
        return (x @ variables["params"], {"batch_stats": mean}) if mutable else x @ variables["params"]

    trainer = wrapped((apply, {"params": jnp.ones((6, 3)), "batch_stats": {"mean": [jnp.zeros(3)]}}))
    with pytest.raises(ModelError, match=message):
        trainer.step((X, Y))


def test_an_apply_gets_arguments_by_name():
    module = nn.Dense(3)

    def apply(variables, x, **more):
        return module.apply(variables, x, **more)

    for hidden in (apply, jax.jit(apply), jax.vmap(module.apply, in_axes=(None, 0))):
        with pytest.raises(
            ModelError,
            match=r"apply function takes \*\*kwargs, .* Name the arguments that it needs, e\.g\. apply\(variables",
        ):
            wrapped((hidden, module.init(jax.random.key(0), X)))


def test_errors_of_a_linen_module_have_no_added_note():
    class Failing(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x) + {}["missing"]

    with pytest.raises(KeyError) as caught:
        wrapped((Failing(), {"params": {"Dense_0": nn.Dense(3).init(jax.random.key(0), X)["params"]}})).step((X, Y))
    assert not any("names them" in note for note in caught.value.__notes__)


def test_an_apply_gets_keys_and_returns_mutable_variables():
    def apply(variables, x, *, rngs, mutable):
        outputs = x @ variables["params"] + jax.random.normal(rngs["dropout"], (3,))
        kept = {"batch_stats": {"mean": variables["batch_stats"]["mean"] + 1}}
        return (outputs, kept) if mutable else outputs

    trainer = wrapped((apply, {"params": jnp.ones((6, 3)), "batch_stats": {"mean": jnp.zeros(3)}}))
    trainer.step((X, Y))
    assert trainer.predict(X).shape == (16, 3)
    np.testing.assert_allclose(trainer.state()["model.batch_stats.mean"].data, np.ones(3))


def test_an_apply_may_use_a_key_of_any_name():
    asked = jax.jit(lambda rngs: jax.random.normal(rngs["noise"], (3,)))

    def apply(variables, x, *, rngs):
        noise = jax.random.normal(rngs["noise"], (3,))
        return x @ variables["params"] + noise + asked(rngs) + 0 * jax.random.normal(rngs["other"], (3,))

    def trained(count):
        trainer = wrapped((apply, {"params": jnp.ones((6, 3), jnp.float32)}), devices=count)
        trainer.step((X, Y))
        return trainer.digest()

    assert trained(1) == trained(3)


def test_the_keys_of_a_shard_are_fixed():
    """Results depend on the keys of a linen module, so these must never change."""
    key = rng.wrap_key(np.array([1, 2], np.uint32))
    streams = rng.NamedKeys(key)
    assert sorted(streams) == ["dropout", "params"]
    for index, name in enumerate(("params", "dropout")):
        assert streams[name] == jax.random.fold_in(key, index)
    again = jax.tree.map(lambda leaf: leaf, streams)
    names = ("params", "dropout", "noise", "other")
    assert [again[name] for name in names] == [streams[name] for name in names]
    assert len({tuple(jax.random.key_data(streams[name]).tolist()) for name in names}) == 4


def test_an_apply_may_return_a_plain_number():
    def apply(variables, x, *, mutable):
        outputs = x @ variables["params"]
        return (outputs, {"kept": {"count": 3, "mean": 0.5}}) if mutable else outputs

    kept = {"count": np.int32(0), "mean": np.zeros((), np.float32)}
    for shards in (1, 4):
        given = (apply, {"params": jnp.ones((6, 3)), "kept": kept})
        trainer = lockstep.wrap(given, optax.sgd(0.1), LOSS, shards=shards)
        trainer.step((X, Y))
        found = trainer.state()
        assert (found["model.kept.count"].data, found["model.kept.count"].dtype) == (3, "int32")
        assert (found["model.kept.mean"].data, found["model.kept.mean"].dtype) == (0.5, "float32")


def test_two_arrays_of_one_name_are_refused():
    params = {"a.b": jnp.ones((6, 3)), "a": {"b": jnp.ones((6, 3))}}
    with pytest.raises(ModelError, match=r"Two arrays of the model have the same name 'a.b': .* Use keys without"):
        wrapped((lambda params, x: x @ params["a.b"] + x @ params["a"]["b"], params))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, 0.1, "adam"])
def test_an_optimizer_that_is_not_optax_is_refused(optimizer):
    with pytest.raises(OptimizerError, match="A JAX model needs an optax optimizer"):
        wrapped(optimizer=optimizer)


def test_an_nnx_optimizer_of_another_model_is_refused():
    wider = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    unbiased = nnx.Linear(6, 3, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(
        OptimizerError, match=r"another model: its state has \(4,\) at '0.mu.bias', and this model needs \(3,\)\. Use"
    ):
        wrapped(optimizer=nnx.Optimizer(wider, optax.adam(0.1), wrt=nnx.Param))
    with pytest.raises(OptimizerError, match=r"its state has nothing at '0.mu.bias', and this model needs \(3,\)"):
        wrapped(optimizer=nnx.Optimizer(unbiased, optax.adam(0.1), wrt=nnx.Param))


def test_an_nnx_optimizer_may_read_initial_parameter_values():
    def init(params):
        return {"largest": jnp.asarray(max(float(abs(leaf).max()) for leaf in jax.tree.leaves(params)))}

    model = net()
    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    wrapped(model, nnx.Optimizer(model, tx, wrt=nnx.Param)).step((X, Y))


def test_a_missing_optimizer_is_refused():
    with pytest.raises(OptimizerError, match="Got NoneType"):
        lockstep.wrap(net(), None, LOSS)


def test_losses_and_metrics_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match=r"is not a loss\. Use one of 'cross_entropy', 'mse'"):
        wrapped(loss="hinge")
    with pytest.raises(ModelError, match="A loss must return one number, one per example"):
        wrapped(loss=lambda out, y: out.sum(0)).step((X, Y))
    with pytest.raises(ModelError, match=r"The squared error got outputs of shape .* but both shapes must be equal"):
        wrapped(loss="mse").step((X, Y))
    with pytest.raises(ModelError, match="A metric must return one value per example"):
        wrapped(metrics={"odd": lambda out, y: out.sum(0)}).step((X, Y))
    with pytest.raises(ModelError, match="Example weights need a loss that gives one value per example"):
        wrapped(loss=lambda out, y: LOSS(out, y).mean()).step((X, Y, np.ones(16)))
    with pytest.raises(ModelError, match="Without a loss in wrap, the model's output must have the loss"):
        wrapped(loss=None).step(X)


def test_the_loss_of_an_output_has_one_value_per_example():
    def trainer(outputs):
        return wrapped((apply_giving(outputs), jnp.ones((6, 3))), loss=None)

    with pytest.raises(
        ModelError, match=r"must be one number, or one per example. Got shape \(3,\) for a shard of 4. Ret"
    ):
        trainer(lambda z: {"loss": z[:3, 0]}).step(X)
    assert trainer(lambda z: {"loss": z[:, 0]}).step(X)["loss"] == 6


def test_a_loss_that_is_not_finite_names_step_and_shard_and_changes_nothing():
    trainer = wrapped(devices=2)
    trainer.step((X, Y))
    before = trainer.digest()
    bad = X.copy()
    bad[9] = np.nan  # 16 examples in 4 shards: 8 to 11 are shard 2
    with pytest.raises(NonFiniteError, match="The loss is nan in step 1, shard 2"):
        trainer.step((bad, Y))
    assert trainer.digest() == before


def test_donated_arrays_are_refused():
    take = jax.jit(lambda value: value + 1, donate_argnums=0)
    inputs = jnp.asarray(X)
    take(inputs)
    with pytest.raises(BatchError, match=r"An array of the batch, of shape .*, cannot be read, because"):
        wrapped().fit((inputs, Y), verbose=0)
    with pytest.raises(RuntimeError, match="Array has been deleted"):  # JAX's own words, where core cuts the batch
        wrapped().step((inputs, Y))
    variables = nn.Dense(3).init(jax.random.key(0), X)
    take(variables["params"]["kernel"])
    with pytest.raises(
        StateError, match=r"The memory of \d+ arrays of the model was donated, the first at 'params.kernel'"
    ):
        wrapped((nn.Dense(3), variables))
    model = net()
    trainer = wrapped(model)
    trainer.step((X, Y))
    take(model.kernel[...])
    with pytest.raises(StateError, match=r"The memory of 1 arrays of the model was donated, the first at 'kernel'"):
        trainer.step((X, Y))
    fresh = jnp.zeros((6, 3), jnp.float32)
    model.kernel.set_value(fresh)
    take(fresh)
    with pytest.raises(StateError, match=r"The memory of 1 arrays of the model was donated, the first at 'kernel'"):
        trainer.step((X, Y))
    model.kernel.set_value(jnp.zeros((6, 3), jnp.float32))
    trainer.step((X, Y))


def test_a_model_without_parameters_is_refused():
    model = nnx.BatchNorm(6, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(ModelError, match=r"^The model has no parameters to train\. Add a layer or a parameter"):
        wrapped(model).step((X, Y))


def test_a_loss_that_is_an_integer_is_refused():
    with pytest.raises(ModelError, match=r"must be a floating-point scalar\. Got int32\. Return a float"):
        wrapped(nnx.Linear(6, 3, rngs=nnx.Rngs(0)), loss=lambda z, y: z.sum().astype(jnp.int32)).step((X, Y))


def test_only_a_train_state_has_a_state():
    model = wrapped((lambda params, x: x @ params, jnp.ones((6, 3)))).model
    with pytest.raises(ModelError, match=r"not wrapped as a TrainState, so it has no `state`\. Use `variables`"):
        model.state  # noqa: B018


def test_a_device_that_jax_does_not_have_is_refused():
    with pytest.raises(DeviceError, match=r"^JAX has no device 'cuda:7'\. Use one of cpu:0"):
        devices.find_devices(["cuda:7"], exact=True, movable=())


def test_parameters_that_are_not_real_numbers_are_refused():
    with pytest.raises(ModelError, match=r"The parameter 'w' has the type int32"):
        wrapped((lambda params, x: x @ params["w"], {"w": jnp.ones((6, 3), jnp.int32)})).step((X, Y))
    with pytest.raises(ModelError, match=r"need a collection 'params' to train\. Got the collections \[.*\]\. Add a"):
        wrapped((nn.Dense(3), {"batch_stats": {}}))


def test_fp16_and_too_few_shards_are_refused():
    with pytest.raises(ModelError, match="'fp16' is not supported on JAX, because it needs a loss scale"):
        wrapped(precision="fp16")
    with pytest.raises(PlanError, match=r"needs at least .* shards, got shards="):
        wrapped(devices=5)


def test_a_state_of_another_model_is_refused():
    trainer = wrapped()
    trainer.step((X, Y))
    state = trainer.state()
    with pytest.raises(StateError, match="The checkpoint does not fit this model: 'odd' is not in the model"):
        trainer.load_state({**state, "model.odd": state["model.bias"]})
    with pytest.raises(StateError, match=r"does not fit this optimizer: '0.count' is not in the optimizer"):
        trainer.load_state({**state, "optimizer.0.count": state["model.bias"]})


def test_an_objective_with_changing_metric_names_is_refused():
    @lockstep.objective
    def loss(model, batch):
        value = LOSS(model(batch["x"]), batch["y"]).mean()
        return value, {"a" if len(batch["y"]) > 3 else "b": value}

    with pytest.raises(ModelError, match="An objective must return the same metrics for every shard"):
        lockstep.wrap(net(), optax.sgd(0.1), loss, shards=2).step({"x": X[:7], "y": Y[:7]})


def test_an_unknown_kind_of_model_is_refused():
    with pytest.raises(ModelError, match=r"^tuple is not a JAX model\. Use a flax.nnx.Module"):
        models.adapt_model((jnp.ones(3), jnp.ones(3)))


def test_a_loss_scale_in_a_train_state_is_refused():
    class Scaled(TrainState):
        dynamic_scale: object = None

    module = nn.Dense(3)
    params = module.init(jax.random.key(0), X)["params"]
    scale = DynamicScale()
    state = Scaled.create(apply_fn=module.apply, params=params, tx=optax.sgd(0.1), dynamic_scale=scale)
    with pytest.raises(
        ModelError, match=r"a loss scale 'dynamic_scale' .* state\.replace\(dynamic_scale=None\) and pre"
    ):
        lockstep.wrap(state, None, LOSS)
    with lockstep.wrap(state.replace(dynamic_scale=None), None, LOSS, precision="bf16") as trainer:
        trainer.step((X, Y))


def test_a_function_that_takes_a_key_before_the_inputs_is_refused():
    def apply(params, rng, x):
        return x @ params * jax.random.bernoulli(rng, 0.5, (3,))

    params = jnp.ones((6, 3))
    with pytest.raises(
        ModelError, match=r"Use lambda variables, x, \*, rngs: apply\(variables, rngs\['dropout'\], x\)"
    ):
        wrapped((apply, params))
    wrapped((lambda variables, x, *, rngs: apply(variables, rngs["dropout"], x), params)).step((X, Y))


def test_a_variable_that_is_not_an_array_is_refused():
    with pytest.raises(ModelError, match=r"must be arrays\. Got a function at '1'\. Give the arrays alone"):
        wrapped((lambda variables, x: x @ variables[0], [jnp.ones((6, 3)), lambda x: x]))
