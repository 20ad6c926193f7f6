"""The kinds of models and optimizers, and the ways in which a model gets its mode."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import lockstep
from backends.kits import jax as kit
from lockstep.backends.jax import named_pytrees
from lockstep.errors import CallbackError, ModelError, OptimizerError

GENERATOR = np.random.Generator(np.random.PCG64(5))
X = GENERATOR.standard_normal((24, 6)).astype(np.float32)
Y = GENERATOR.integers(0, 3, 24)
assert kit.module  # has made the CPU devices
LOSS = optax.softmax_cross_entropy_with_integer_labels


class Argument(nn.Module):
    """Gets the mode as an argument."""

    @nn.compact
    def __call__(self, x, *, train: bool):
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


class Inverted(nn.Module):
    """Gets the mode as the opposite argument, `deterministic`."""

    @nn.compact
    def __call__(self, x, deterministic: bool):
        return Argument()(x, train=not deterministic)


class Fielded(nn.Module):
    """Gets the mode as a field."""

    training: bool = True

    @nn.compact
    def __call__(self, x):
        return Argument()(x, train=self.training)


class Flagged(nnx.Module):
    """Gets the mode from `train()` and `eval()`."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


class Told(Flagged):
    """An nnx module with its mode as an argument."""

    def __call__(self, x, training):
        x = self.norm(self.first(x), use_running_average=not training)
        return self.last(self.dropout(x, deterministic=not training))


class Shadowing(Flagged):
    """Has a field where nnx has a method."""

    def __init__(self):
        super().__init__()
        self.train = False

    def __call__(self, x):
        return super().__call__(x) if self.train else super().__call__(x) * 2


class Deep(Flagged):
    """A layer of it has a mode field, the module itself has none."""

    def __init__(self):
        super().__init__()
        self.inner = nnx.List([Shadowing()])
        self.inner[0].training = True

    def __call__(self, x):
        return super().__call__(x) * (1 if self.inner[0].training and self.inner[0].train else 2)


class Overriding(Flagged):
    """Overrides `train` and `eval` to set its factor."""

    def train(self):
        super().train()
        self.factor = 1

    def eval(self):
        super().eval()
        self.factor = 2

    def __call__(self, x):
        return super().__call__(x) * self.factor


def initialized(module, **mode):
    return module.init(jax.random.key(1), X[:2], **mode)


def pair():
    module = Argument()
    return module.apply, initialized(module, train=False)


def state(around=lambda apply: apply):
    class State(TrainState):
        batch_stats: object = None

    module = Argument()
    variables = initialized(module, train=False)
    return State.create(
        apply_fn=around(module.apply),
        params=variables["params"],
        tx=optax.sgd(0.1),
        batch_stats=variables["batch_stats"],
    )


def jitted(apply):
    return jax.jit(apply, static_argnames=("train", "mutable"))


MODELS = {
    "linen, from the first batch": lambda: Argument(),
    "linen, deterministic": lambda: Inverted(),
    "linen, a field": lambda: Fielded(),
    "linen, bound": lambda: Argument().bind(initialized(Argument(), train=False)),
    "(apply, variables)": pair,
    "(module, variables)": lambda: (Argument(), initialized(Argument(), train=False)),
    "(jitted apply, variables)": lambda: (jitted(pair()[0]), pair()[1]),
    "(partial, variables)": lambda: (jax.jit(partial(jitted(pair()[0]), train=True, method="__call__")), pair()[1]),
    "TrainState": state,
    "TrainState, jitted": lambda: state(jitted),
    "nnx, flags": Flagged,
    "nnx, an argument": Told,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_kind_of_model_trains_and_evaluates(make):
    model = make()
    optimizer = None if isinstance(model, TrainState) else optax.sgd(0.1)
    trainer = lockstep.wrap(model, optimizer, LOSS, devices=2, shards=4)
    first = trainer.step((X, Y))["loss"]
    before = trainer.digests()
    rows = trainer.predict(X)
    np.testing.assert_array_equal(trainer.predict(X), rows)  # no dropout, no statistics of the batch
    own = trainer.model(X, training=False) if isinstance(model, Told) else bound(trainer.model)(X)
    np.testing.assert_allclose(np.asarray(own), rows, rtol=1e-5, atol=1e-5)
    assert trainer.digests() == before
    if isinstance(model, nnx.Module):
        model.train()
    for _ in range(15):
        last = trainer.step((X, Y))["loss"]
    assert last < first
    statistics = [name for name in before if "mean" in name or "var" in name]
    assert len(statistics) == 2
    assert all(trainer.digests()[name] != before[name] for name in statistics)


def shadowing():
    model = Shadowing()
    model.train = True
    return model


def deep():
    model = Deep()
    model.inner[0].train = True
    return model


def overriding():
    model = Overriding()
    model.train()
    return model


@pytest.mark.parametrize("made", [shadowing, deep, overriding])
def test_the_mode_is_passed_to_every_module_that_takes_it(made):
    """Without training its outputs are doubled, and the script's flags do not change."""
    model, plain = made(), Flagged()
    fields = {name: value for name, value in vars(model).items() if isinstance(value, bool)}
    trainer = lockstep.wrap(model, optax.sgd(0.0), LOSS, shards=2)
    usual = lockstep.wrap(plain, optax.sgd(0.0), LOSS, shards=2)
    assert trainer.step((X, Y))["loss"] == pytest.approx(usual.step((X, Y))["loss"], rel=1e-6)
    np.testing.assert_allclose(trainer.predict(X), 2 * usual.predict(X), rtol=1e-6)
    assert {name: value for name, value in vars(model).items() if isinstance(value, bool)} == fields


def bound(model):
    if isinstance(model, nnx.Module):
        model.eval()
    return model


def test_the_mode_is_passed_to_a_method_of_a_module():
    class Several(nn.Module):
        @nn.compact
        def __call__(self, x):
            return self.other(x, training=False)

        @nn.compact
        def other(self, x, *, training):
            return nn.Dense(3, name="only")(x) * (1 if training else 2)

    module = Several()
    apply, variables = partial(module.apply, method="other"), initialized(module)
    trainer = lockstep.wrap((apply, variables), optax.sgd(0.0), LOSS, shards=2)
    plain = lockstep.wrap((nn.Dense(3), {"params": variables["params"]["only"]}), optax.sgd(0.0), LOSS, shards=2)
    assert trainer.step((X, Y))["loss"] == plain.step((X, Y))["loss"]
    again = lockstep.wrap(trainer.model, optax.sgd(0.0), LOSS, shards=2)
    for each in (trainer, again):
        np.testing.assert_allclose(each.predict(X), 2 * plain.predict(X), rtol=1e-6)


def test_a_plain_function_of_plain_parameters():
    def apply(params, x):
        return x @ params["w"] + params["b"]

    params = {"w": jnp.ones((6, 3)), "b": jnp.zeros(3)}
    trainer = lockstep.wrap((apply, params), optax.adam(0.1), LOSS, shards=4)
    trainer.step((X, Y))
    assert sorted(name for name in trainer.digests() if name.startswith("model")) == ["model.b", "model.w"]
    np.testing.assert_allclose(trainer.model(X), trainer.predict(X), rtol=1e-6)
    assert trainer.model.variables["w"].shape == (6, 3)


def test_variables_may_be_numpy_arrays():
    trainer = lockstep.wrap(
        (lambda params, x: x @ params["w"], {"w": np.ones((6, 3), np.float32)}), optax.sgd(0.1), LOSS
    )
    np.testing.assert_allclose(trainer.predict(X), X @ np.ones((6, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("made", [lambda: (nn.Dense(3), initialized(nn.Dense(3))), state], ids=["pair", "TrainState"])
def test_the_model_of_a_trainer_may_be_wrapped_again(made):
    model = made()
    optimizer = None if isinstance(model, TrainState) else optax.sgd(0.1)
    one = lockstep.wrap(model, optimizer, LOSS, shards=2)
    one.step((X, Y))
    rows = one.predict(X)
    other = lockstep.wrap(one.model, optimizer, LOSS, shards=2)
    np.testing.assert_array_equal(other.predict(X), rows)
    other.step((X, Y))
    np.testing.assert_array_equal(one.predict(X), rows)
    for trainer in (one, other):
        np.testing.assert_allclose(trainer.model(X), trainer.predict(X), rtol=1e-5, atol=1e-5)


def test_the_train_state_of_the_handle_is_current():
    given = state()
    before = np.array(given.params["Dense_0"]["kernel"])
    trainer = lockstep.wrap(given, None, LOSS, devices=2, shards=2)
    trainer.step((X, Y))
    trainer.step((X, Y))
    found = trainer.model.state
    assert isinstance(found, type(given))
    assert int(found.step) == 2
    assert found.params["Dense_0"]["kernel"].tobytes() == trainer.state()["model.params.Dense_0.kernel"].data.tobytes()
    assert np.array(given.params["Dense_0"]["kernel"]).tobytes() == before.tobytes()  # the script's own, untouched
    trainer.step((X, Y))  # what was handed out is no part of an update
    assert np.isfinite(np.array(found.opt_state[0].trace["Dense_0"]["kernel"] if found.opt_state[0] else 0)).all()


def test_an_objective_updates_the_models_statistics():
    @lockstep.objective
    def loss(model, batch):
        return LOSS(model(batch["x"]), batch["y"]).mean()

    module = Argument()
    given = module, initialized(module, train=False)
    by_objective = lockstep.wrap(given, optax.sgd(0.1), loss, shards=4)
    by_loss = lockstep.wrap(given, optax.sgd(0.1), LOSS, shards=4)
    by_objective.step({"x": X, "y": Y})
    by_loss.step((X, Y))
    assert by_objective.digest() == by_loss.digest()


def test_a_module_may_branch_on_plain_values_of_its_first_batch():
    class Branching(nn.Module):
        @nn.compact
        def __call__(self, x, negative, how):
            return nn.Dense(3)(-x if negative and how == "plain" else x)

    trainer = lockstep.wrap(Branching(), optax.sgd(0.1), LOSS, shards=2)
    trainer.step(({"x": X, "negative": True, "how": "plain"}, Y))
    assert trainer.model.variables["params"]["Dense_0"]["kernel"].shape == (6, 3)


def test_sown_values_are_not_state():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "size", (x**2).mean())
            self.sow("carry", "seen", x)
            carry = self.variable("carry", "pair", lambda: (jnp.zeros(6, x.dtype), jnp.zeros((), x.dtype)))
            mean, count = carry.value
            if not self.is_initializing() and self.is_mutable_collection("carry"):
                carry.value = mean + x.mean(0), count + 1
            return nn.Dense(3)(x + mean)

    lazy = lockstep.wrap(Sowing(), optax.sgd(0.1), LOSS, shards=2)
    given = initialized(Sowing())
    pair = lockstep.wrap((Sowing(), given), optax.sgd(0.1), LOSS, shards=2)
    again = None
    for trainer in (lazy, pair):
        trainer.step((X, Y))
        trainer.step((X, Y))
        again = again or lockstep.wrap(lazy.model, optax.sgd(0.1), LOSS, shards=2)
        mean, count = trainer.model.variables["carry"]["pair"]
        assert count == 2
        np.testing.assert_allclose(mean, 2 * X.mean(0), rtol=1e-4)
    again.step((X, Y))
    for variables in (lazy.model.variables, again.model.variables):
        assert sorted(variables) == ["carry", "params"]
        assert sorted(variables["carry"]) == ["pair"]
    found = pair.model.variables  # what the script gave stays as it was given
    assert found["losses"] == given["losses"]
    np.testing.assert_array_equal(found["carry"]["seen"], given["carry"]["seen"])


def test_values_sown_by_nnx_are_not_state():
    class Sowing(Flagged):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return super().__call__(x)

    def trained(**more):
        trainer = lockstep.wrap(Sowing(), optax.sgd(0.1), LOSS, shards=2)
        for _ in range(2):
            trainer.step((X, Y))
            for count in more.values():
                trainer.model(X[:count])
        return trainer

    with pytest.warns(DeprecationWarning, match="sow"):
        quiet, called = trained(), trained(rows=2)
    wrapped = lockstep.wrap(called.model, optax.sgd(0.1), LOSS, shards=2)
    assert len(called.model.seen.get_value()) == 2
    assert called.digests().keys() == quiet.digests().keys() == wrapped.digests().keys()
    assert not any("seen" in name for name in called.digests())


def test_an_objective_needs_an_initialized_linen_module():
    trainer = lockstep.wrap(Argument(), optax.sgd(0.1), lockstep.objective(lambda model, batch: model(batch).mean()))
    with pytest.raises(ModelError, match="no variables, and Lockstep cannot initialize it, because the objective may"):
        trainer.step(X)


def test_the_module_of_the_script_is_up_to_date_after_every_step():
    model = Flagged()
    trainer = lockstep.wrap(model, optax.adam(0.1), LOSS, devices=3, shards=8)
    for _ in range(2):
        trainer.step((X, Y))
        assert np.array(model.first.kernel[...]).tobytes() == trainer.state()["model.first.kernel"].data.tobytes()
        assert np.array(model.norm.mean[...]).tobytes() == trainer.state()["model.norm.mean"].data.tobytes()
    held = model.first.kernel[...]
    trainer.step((X, Y))
    assert np.isfinite(np.array(held)).all()  # what the script holds is never donated


def test_arrays_written_by_the_script_reach_every_device():
    one, two = Flagged(), Flagged()
    trainers = [lockstep.wrap(model, optax.sgd(0.1), LOSS, devices=n, shards=4) for model, n in ((one, 1), (two, 4))]
    for trainer, model in zip(trainers, (one, two), strict=True):
        trainer.step((X, Y))
        model.last.bias[...] = jnp.full(3, 0.5)
        model.dropout.rate = 0.1
        trainer.step((X, Y))
    assert trainers[0].digest() == trainers[1].digest()


def test_a_replaced_variable_is_refused():
    model = Flagged()
    trainer = lockstep.wrap(model, optax.sgd(0.1), LOSS, shards=2)
    model.last = nnx.Linear(16, 3, rngs=nnx.Rngs(3))
    with pytest.raises(
        ModelError, match=r"^The model's attribute '.*' was replaced, added or removed after lockstep.wrap"
    ):
        trainer.step((X, Y))


def test_only_the_variables_of_the_optimizer_are_trained():
    model = Flagged()
    last = nnx.All(nnx.Param, nnx.PathContains("last"))
    trainer = lockstep.wrap(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=last), LOSS, shards=2)
    before = trainer.digests()
    trainer.step((X, Y))
    changed = {name for name, digest in trainer.digests().items() if digest != before[name]}
    assert {"model.last.kernel", "model.last.bias"} <= changed
    assert not {"model.first.kernel", "model.norm.scale"} & changed


def test_learning_rates_can_be_read_and_set_where_optax_keeps_them():
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    trainer = lockstep.wrap((Argument(), initialized(Argument(), train=False)), tx, LOSS, devices=2, shards=2)
    assert trainer.learning_rates == pytest.approx((0.1,))
    trainer.learning_rates = (0.0,)
    before = {name: value for name, value in trainer.digests().items() if name.startswith("model.params")}
    trainer.step((X, Y))
    assert before.items() <= trainer.digests().items()


def test_learning_rates_inside_functions_can_be_neither_read_nor_set():
    trainer = lockstep.wrap(Flagged(), optax.adam(0.1), LOSS)
    assert trainer.learning_rates == ()
    with pytest.raises(OptimizerError, match="learning_rates has 1 rates for 0 groups"):
        trainer.learning_rates = (0.1,)
    with pytest.raises(OptimizerError, match=r"optax.inject_hyperparams"):
        trainer.session.backend.set_numbers([{"lr": 0.1}])


def test_a_callback_that_needs_variables_before_the_first_batch_is_refused():
    trainer = lockstep.wrap(Flagged(), optax.adam(0.1), LOSS)
    message = "LearningRateSchedule cannot change the learning rate .*optax.inject_hyperparams"
    with pytest.raises(CallbackError, match=message):
        trainer.fit((X, Y), callbacks=[lockstep.LearningRateSchedule(lambda epoch: 0.1)], verbose=0)


def test_learning_rates_exist_before_the_first_batch():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    trainer = lockstep.wrap(Argument(), tx, LOSS, shards=2)
    assert trainer.learning_rates == pytest.approx((0.1,))
    trainer.learning_rates = (0.0,)
    trainer.step((X, Y))
    assert trainer.learning_rates == (0.0,)
    before = trainer.digests()
    trainer.learning_rates = (0.5,)
    trainer.step((X, Y))
    changed = {name for name, digest in trainer.digests().items() if digest != before[name]}
    assert any(name.startswith("model.params") for name in changed)


def test_verify_before_the_first_batch():
    trainer = lockstep.wrap(Argument(), optax.adam(0.1), LOSS, shards=2)
    assert trainer.verify((X, Y), steps=2, devices=(1, 2), batch_size=16).equal
    assert trainer.digests() == {}
    with pytest.raises(ModelError, match="linen module has no variables yet"):
        trainer.model(X)
    trainer.step((X[:, :4], Y))  # nothing of the other width is left


def test_a_transformation_may_use_the_loss():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    trainer = lockstep.wrap(Flagged(), tx, LOSS, shards=2)
    trainer.step((X, Y))
    assert any("best_value" in name for name in trainer.digests())


def test_mixed_precision_keeps_the_parameters_wide():
    trainer = lockstep.wrap(Flagged(), optax.sgd(0.1), LOSS, precision="bf16", devices=2, shards=4)
    plain = lockstep.wrap(Flagged(), optax.sgd(0.1), LOSS, devices=2, shards=4)
    losses = [each.step((X, Y))["loss"] for each in (trainer, plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert trainer.state()["model.first.kernel"].dtype == "float32"
    assert trainer.predict(X).dtype == np.float32


def test_mixed_precision_leaves_targets_and_weights_and_the_loss_wide():
    def apply(params, x):
        assert (params.dtype, x.dtype) == (jnp.bfloat16, jnp.bfloat16)
        return x @ params

    def loss(outputs, targets):
        assert outputs.dtype == targets.dtype == jnp.float32
        return ((outputs - targets) ** 2).mean(1)

    x, targets = np.zeros((8, 2), np.float32), np.full((8, 3), 1000.5, np.float32)
    weights = np.full(8, 1.001, np.float32)
    trainer = lockstep.wrap(
        (apply, jnp.ones((2, 3))), optax.sgd(0.1), loss, precision="bf16", metrics=["mae"], shards=2
    )
    logs = trainer.step((x, targets, weights))
    assert (logs["loss"], logs["mae"]) == pytest.approx((1000.5**2, 1000.5), rel=1e-6)  # bfloat16 has 1000


def test_one_shard_on_one_device_is_the_plain_loop():
    """The plain loop is one jit of gradient and update."""
    trainer = lockstep.wrap(Plain(), optax.adam(0.01), LOSS, shards=1)
    model, tx = Plain(), optax.adam(0.01)
    graph, params = nnx.split(model)
    params = nnx.as_pure(params)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state):
        loss, gradients = jax.value_and_grad(lambda params: LOSS(nnx.merge(graph, params)(X), Y).mean())(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    for _ in range(4):
        loss, params, opt_state = step(params, opt_state)
        assert trainer.step((X, Y))["loss"] == float(loss)
    for name, value in named_pytrees.name_leaves(params).items():
        assert trainer.state()[f"model.{name}"].data.tobytes() == np.array(value).tobytes(), name


class Plain(nnx.Module):
    """Two layers."""

    def __init__(self):
        self.first = nnx.Linear(6, 16, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(16, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def test_an_nnx_module_of_several_networks_needs_no_call():
    class Networks(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    @lockstep.objective
    def both(nets, batch):
        return (nets.second(nets.first(batch)) ** 2).mean()

    digests = set()
    for devices in (1, 2):
        with lockstep.wrap(Networks(), optax.sgd(0.1), both, devices=devices, shards=2) as trainer:
            trainer.step(np.ones((4, 3), np.float32))
            digests.add(trainer.digest())
    assert len(digests) == 1
