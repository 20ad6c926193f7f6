"""What cannot be trained as it is says so."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import lockstep
from backends.kits import jax as kit
from lockstep.backends.jax import CrossEntropy, models, rng
from lockstep.errors import BatchError, ModelError, NonFiniteError, OptimizerError, PlanError, StateError

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
        (X, "With a loss of .outputs, targets. a batch is .inputs, targets."),
        ((X, np.array(["a"] * 16)), "JAX computes on arrays of numbers"),
        ((X, Y, np.ones((16, 2))), r"There is one weight per example. Got weights of shape \(4, 2\) for a shard of 4"),
        ((X, Y, 1), r"There is one weight per example. Got weights of shape \(\) for a shard of 4. Give one number"),
        ((X, Y, jax.random.split(jax.random.key(0), 16)), "A batch's arrays are numbers. Got key<.*key_data"),
    ],
)
def test_batches(batch, message):
    with pytest.raises(BatchError, match=message):
        wrapped().step(batch)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize(("targets", "got"), [(1, "int"), ({"y": Y}, "{'y': .*}")])
def test_targets_that_are_no_array(loss, targets, got):
    with pytest.raises(BatchError, match=f"Targets are one array with a row per example. Got {got}. Give such"):
        wrapped(loss=loss).step((X, targets))


ODDS = np.full((16, 3), 1 / 3, np.float32)


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (CrossEntropy(ignore_index=2), ODDS, "ignore_index only works with integer labels.* Got ignore_index=2"),
        (CrossEntropy(), ODDS[:, :2], r"class probabilities of the same shape. Got \(4, 3\) and \(4, 2\) of float32"),
        (CrossEntropy(), ODDS[:, 0], r"class probabilities of the same shape. Got \(4, 3\) and \(4,\) of float32"),
        (CrossEntropy(weights=(1.0, 2.0)), ODDS, "Class weights are one for each class. Got 2 for 3 classes"),
    ],
)
def test_targets_of_cross_entropy(loss, targets, message):
    with pytest.raises(ModelError, match=message):
        wrapped(loss=loss).step((X, targets))


@pytest.mark.parametrize("outputs", [lambda z: z.sum(), lambda z: z[:1], lambda z: z.T])
def test_an_apply_that_gives_another_shape(outputs):
    trainer = wrapped((apply_giving(outputs), jnp.ones((6, 3))))
    with pytest.raises(ModelError, match="A model's outputs have one row per example"):
        trainer.step((X, Y))


def test_an_apply_that_drops_a_variable_is_refused():
    def apply(variables, x, *, rngs, mutable):
        return x @ variables["params"]

    trainer = wrapped((apply, {"params": jnp.ones((6, 3)), "batch_stats": {"mean": jnp.zeros(3)}}))
    with pytest.raises(ModelError, match=r"With mutable=\['batch_stats'\] apply gives .outputs, variables."):
        trainer.step((X, Y))


def test_an_apply_gets_arguments_by_name():
    module = nn.Dense(3)

    def apply(variables, x, **more):
        return module.apply(variables, x, **more)

    for hidden in (apply, jax.jit(apply), jax.vmap(module.apply, in_axes=(None, 0))):
        with pytest.raises(
            ModelError, match=r"names them. Got one with \*\*. Write for example apply\(variables, x, \*"
        ):
            wrapped((hidden, module.init(jax.random.key(0), X)))


def test_a_linen_modules_own_errors_have_no_note_of_ours():
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


def test_an_apply_may_ask_for_a_key_of_any_name():
    asked = jax.jit(lambda rngs: jax.random.normal(rngs["noise"], (3,)))

    def apply(variables, x, *, rngs):
        noise = jax.random.normal(rngs["noise"], (3,))
        return x @ variables["params"] + noise + asked(rngs) + 0 * jax.random.normal(rngs["other"], (3,))

    def trained(count):
        trainer = wrapped((apply, {"params": jnp.ones((6, 3), jnp.float32)}), devices=count)
        trainer.step((X, Y))
        return trainer.digest()

    assert trained(1) == trained(3)


def test_the_keys_of_a_shard():
    """Those of a linen module are part of every result, so they stay what they are."""
    key = rng.made(np.array([1, 2], np.uint32))
    streams = rng.Streams(key)
    assert sorted(streams) == ["dropout", "params"]
    for index, name in enumerate(("params", "dropout")):
        assert streams[name] == jax.random.fold_in(key, index)
    again = jax.tree.map(lambda leaf: leaf, streams)
    names = ("params", "dropout", "noise", "other")
    assert [again[name] for name in names] == [streams[name] for name in names]
    assert len({tuple(jax.random.key_data(streams[name]).tolist()) for name in names}) == 4


def test_an_apply_may_give_back_a_plain_number():
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


def test_every_array_has_a_name_of_its_own():
    params = {"a.b": jnp.ones((6, 3)), "a": {"b": jnp.ones((6, 3))}}
    with pytest.raises(ModelError, match=r"Every array has a name of its own. Got two called 'a.b'. Use names without"):
        wrapped((lambda params, x: x @ params["a.b"] + x @ params["a"]["b"], params))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, 0.1, "adam"])
def test_an_optimizer_that_is_not_optax(optimizer):
    with pytest.raises(OptimizerError, match="A JAX model goes with an optax optimizer"):
        wrapped(optimizer=optimizer)


def test_an_nnx_optimizer_of_another_model():
    wider = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    unbiased = nnx.Linear(6, 3, use_bias=False, rngs=nnx.Rngs(0))
    with pytest.raises(OptimizerError, match=r"made for. At '0.mu.bias' it has \(4,\), for this model .* \(3,\). Make"):
        wrapped(optimizer=nnx.Optimizer(wider, optax.adam(0.1), wrt=nnx.Param))
    with pytest.raises(OptimizerError, match=r"At '0.mu.bias' it has nothing, for this model it would have \(3,\)"):
        wrapped(optimizer=nnx.Optimizer(unbiased, optax.adam(0.1), wrt=nnx.Param))


def test_an_nnx_optimizer_may_look_at_the_numbers_it_starts_from():
    def init(params):
        return {"largest": jnp.asarray(max(float(abs(leaf).max()) for leaf in jax.tree.leaves(params)))}

    model = net()
    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    wrapped(model, nnx.Optimizer(model, tx, wrt=nnx.Param)).step((X, Y))


def test_no_optimizer():
    with pytest.raises(OptimizerError, match="Got NoneType"):
        lockstep.wrap(net(), None, LOSS)


def test_losses_and_metrics():
    with pytest.raises(ModelError, match="A loss is one of 'cross_entropy', 'mse'"):
        wrapped(loss="hinge")
    with pytest.raises(ModelError, match="A loss gives one number, one per example"):
        wrapped(loss=lambda out, y: out.sum(0)).step((X, Y))
    with pytest.raises(ModelError, match="Squared error compares outputs and targets of one shape"):
        wrapped(loss="mse").step((X, Y))
    with pytest.raises(ModelError, match="A metric gives one value per example"):
        wrapped(metrics={"odd": lambda out, y: out.sum(0)}).step((X, Y))
    with pytest.raises(ModelError, match="Example weights need a loss that gives one value per example"):
        wrapped(loss=lambda out, y: LOSS(out, y).mean()).step((X, Y, np.ones(16)))
    with pytest.raises(ModelError, match="Without a loss the model's output carries one"):
        wrapped(loss=None).step(X)


def test_the_loss_of_an_output_has_one_value_per_example():
    def trainer(outputs):
        return wrapped((apply_giving(outputs), jnp.ones((6, 3))), loss=None)

    with pytest.raises(ModelError, match=r"is one number, or one per example. Got shape \(3,\) for a shard of 4. Ret"):
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


def test_arrays_that_were_donated():
    take = jax.jit(lambda value: value + 1, donate_argnums=0)
    inputs = jnp.asarray(X)
    take(inputs)
    with pytest.raises(BatchError, match=r"A batch's arrays are there. Got one of shape .*donated"):
        wrapped().fit((inputs, Y), verbose=0)
    with pytest.raises(RuntimeError, match="Array has been deleted"):  # JAX's own words, where core cuts the batch
        wrapped().step((inputs, Y))
    variables = nn.Dense(3).init(jax.random.key(0), X)
    take(variables["params"]["kernel"])
    with pytest.raises(StateError, match=r"whose memory was donated, the first at 'params.kernel'"):
        wrapped((nn.Dense(3), variables))
    model = net()
    trainer = wrapped(model)
    trainer.step((X, Y))
    take(model.kernel[...])
    with pytest.raises(StateError, match=r"arrays are there. Got 1 whose memory was donated, the first at 'kernel'"):
        trainer.step((X, Y))
    fresh = jnp.zeros((6, 3), jnp.float32)
    model.kernel.set_value(fresh)
    take(fresh)
    with pytest.raises(StateError, match=r"Got 1 whose memory was donated, the first at 'kernel'"):
        trainer.step((X, Y))
    model.kernel.set_value(jnp.zeros((6, 3), jnp.float32))
    trainer.step((X, Y))


def test_parameters_are_real_numbers():
    with pytest.raises(ModelError, match=r"Parameters are real numbers. Got int32 at 'w'"):
        wrapped((lambda params, x: x @ params["w"], {"w": jnp.ones((6, 3), jnp.int32)})).step((X, Y))
    with pytest.raises(ModelError, match="in 'params'"):
        wrapped((nn.Dense(3), {"batch_stats": {}}))


def test_precision_and_plan():
    with pytest.raises(ModelError, match="JAX computes in bfloat16 without a loss scale"):
        wrapped(precision="fp16")
    with pytest.raises(PlanError, match=r"needs at least .* shards, got shards="):
        wrapped(devices=5)


def test_a_state_of_another_model():
    trainer = wrapped()
    trainer.step((X, Y))
    state = trainer.state()
    with pytest.raises(StateError, match="The checkpoint does not fit this model: 'odd' is not in the model"):
        trainer.load_state({**state, "model.odd": state["model.bias"]})
    with pytest.raises(StateError, match=r"does not fit this optimizer: '0.count' is not in the optimizer"):
        trainer.load_state({**state, "optimizer.0.count": state["model.bias"]})


def test_objectives_name_the_same_values_every_time():
    @lockstep.objective
    def loss(model, batch):
        value = LOSS(model(batch["x"]), batch["y"]).mean()
        return value, {"a" if len(batch["y"]) > 3 else "b": value}

    with pytest.raises(ModelError, match="An objective gives the same metrics for every shard"):
        lockstep.wrap(net(), optax.sgd(0.1), loss, shards=2).step({"x": X[:7], "y": Y[:7]})


def test_a_model_in_no_form_that_we_know():
    with pytest.raises(ModelError, match=r"A JAX model is a flax.nnx.Module"):
        models.of((jnp.ones(3), jnp.ones(3)))
