"""AdamW: Keras's numbers and state in place, moments of fewer bits, and rounding that loses nothing on average."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_qwen import QwenCausalLM, QwenConfig
from keras_qwen.training import AdamW
from keras_qwen.training.moments import Float32Moments, Int8Moments, moment_storage
from keras_qwen.training.rounding import random_bits, stochastic_bfloat16, uniform

CONFIG = QwenConfig(
    model_type="qwen2", vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
)  # fmt: skip
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 96, (4, 12)).astype("int32")
LABELS = np.roll(IDS, -1, 1)


def trained(optimizer, dtype="float32", epochs=3):
    """Weights, optimizer and losses after a few steps from the same start."""
    keras.utils.clear_session(free_memory=False)
    model = QwenCausalLM(CONFIG, dtype=dtype)
    rng = np.random.default_rng(1)
    model.set_weights([(rng.normal(0, 0.2, w.shape) + (w.ndim == 1)).astype(w.dtype) for w in model.get_weights()])
    model.compile(optimizer)
    losses = model.fit(IDS, LABELS, batch_size=2, epochs=epochs, shuffle=False, verbose=0).history["loss"]
    return [np.asarray(w, "float32") for w in model.get_weights()], model.optimizer, losses


def plain(weights, gradients, rate, decay, steps):
    """Loshchilov and Hutter's algorithm 2 in float64, as Keras words it."""
    weights = weights.astype("float64")
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for step in range(1, steps + 1):
        gradient = gradients[step - 1].astype("float64")
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        alpha = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        weights = weights * (1 - rate * decay) - alpha * first / (np.sqrt(second) + 1e-7)
    return weights


def stepped(optimizer, start, gradients, dtype="float32"):
    variable = keras.Variable(start, dtype=dtype, name="weight")
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([ops.convert_to_tensor(gradient)], [variable])
    return ops.convert_to_numpy(ops.cast(variable, "float32"))


@pytest.mark.parametrize(
    "settings",
    [{}, {"weight_decay": 0.1, "global_clipnorm": 0.5}, {"use_ema": True, "ema_momentum": 0.5}, {"clipnorm": 0.1}],
    ids=str,
)
def test_fit_with_either_adamw_equals_the_formula_of_keras(settings):
    class Unknown(keras.optimizers.AdamW):
        """Of a type that is left alone: Keras's own operations."""

    expected, reference, _ = trained(Unknown(0.01, **settings))
    for cls in (keras.optimizers.AdamW, functools.partial(AdamW, undecayed=())):
        weights, optimizer, _ = trained(cls(0.01, **settings))
        for a, b in zip(weights, expected, strict=True):
            assert np.linalg.norm(a - b) <= 3e-6 * np.linalg.norm(b)
        for a, b in zip(optimizer.variables, reference.variables, strict=True):
            np.testing.assert_allclose(*(ops.convert_to_numpy(x) for x in (a, b)), rtol=1e-3, atol=1e-6)
        assert "update_step" not in vars(optimizer)  # nothing is left behind


def test_weights_excluded_from_decay_are_not_decayed():
    def with_exclusion(cls):
        optimizer = cls(0.01, weight_decay=5.0)
        optimizer.exclude_from_weight_decay(var_names=["scale", "bias"])
        return optimizer

    class Unknown(keras.optimizers.AdamW):
        pass

    expected, *_ = trained(with_exclusion(Unknown))
    # AdamW leaves norms and biases alone by itself.
    for optimizer in (with_exclusion(keras.optimizers.AdamW), AdamW(0.01, weight_decay=5.0)):
        for a, b in zip(trained(optimizer)[0], expected, strict=True):
            assert np.linalg.norm(a - b) <= 3e-6 * np.linalg.norm(b)


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_steps_with_fewer_bits_stay_near_the_formula(moments):
    start = RNG.normal(size=(64, 128)).astype("float32")
    gradients = RNG.normal(size=(20, 64, 128)).astype("float32") * 10.0 ** RNG.uniform(-3, 0, (1, 64, 1))
    gradients = gradients.astype("float32")
    expected = plain(start, gradients, 0.01, 0.1, 20)
    found = stepped(AdamW(0.01, weight_decay=0.1, moments=moments), start, gradients)
    moved = np.linalg.norm(expected - start)
    assert np.linalg.norm(found - expected) < {"bfloat16": 0.01, "int8": 0.05}[moments] * moved


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_training_with_fewer_bits_reaches_the_same_loss(moments):
    *_, expected = trained(AdamW(0.01), epochs=8)
    _, optimizer, found = trained(AdamW(0.01, moments=moments), epochs=8)
    assert found[-1] < 0.5 * found[0]
    assert found[-1] == pytest.approx(expected[-1], rel=0.1)
    sizes = [np.prod(v.shape) * keras.backend.standardize_dtype(v.dtype).endswith("8") for v in optimizer.variables]
    assert (sum(sizes) > 0) == (moments == "int8")


def test_state_of_8_bits_takes_little_more_than_a_quarter_of_float32():
    storage = moment_storage("int8", (1000, 4864))
    assert isinstance(storage, Int8Moments) and storage.block == 128
    bytes_each = {"int8": 1, "uint8": 1, "float32": 4}
    total = sum(np.prod(shape) * bytes_each[dtype] for _, shape, dtype in storage.state((1000, 4864)))
    assert total < 0.26 * 2 * 4 * 1000 * 4864
    for shape in ((10,), (100_000,), (4096, 4099)):  # vectors, and a prime: no blocks
        assert isinstance(moment_storage("int8", shape), Float32Moments)
    assert moment_storage("int8", (64, 64 * 7)).block == 64 and moment_storage("int8", (64, 32 * 7)).block == 32


@pytest.mark.parametrize("rows", [8, 3])
def test_8_bits_are_right_on_average_and_never_round_the_second_moment_to_zero(rows):
    sizes = 10.0 ** np.arange(rows)[:, None]  # each row's blocks have scales of their own
    first = (RNG.normal(size=(rows, 256)) * sizes).astype("float32")
    second = (first**2 * 10.0 ** RNG.uniform(-9, 0, first.shape)).astype("float32")
    storage = Int8Moments(128)
    sums = np.zeros((2, *first.shape))
    for seed in range(400):
        read = storage.read(storage.write(ops.convert_to_tensor(first), ops.convert_to_tensor(second), seed))
        found = [ops.convert_to_numpy(x) for x in read]
        assert (found[1] > 0).all()
        sums += found
    first_mean, second_mean = sums / 400
    largest = lambda x: np.repeat(np.abs(x).reshape(rows, 2, 128).max(2), 128, 1)  # noqa: E731
    assert (np.abs(first_mean - first) < 0.003 * largest(first)).all()
    assert np.abs(second_mean / second - 1)[second > 1e-5 * largest(second)].max() < 0.05
    zero = ops.zeros((2, 256))
    assert all((ops.convert_to_numpy(x) == 0).all() for x in storage.read(storage.write(zero, zero, 0)))


def test_stochastic_rounding_takes_the_neighbours_with_the_right_frequency():
    x = np.full((100_000,), 1.0 + 0.3 / 128, "float32")  # bfloat16 next to 1 is 1 + 1/128
    rounded = stochastic_bfloat16(ops.convert_to_tensor(x), random_bits(x.shape, 5))
    values = ops.convert_to_numpy(ops.cast(rounded, "float32"))
    assert set(np.unique(values)) == {1.0, 1.0 + 1 / 128}
    assert values.mean() == pytest.approx(x[0], abs=3e-5)
    exact = np.array([0.0, -1.5, np.inf, -np.inf], "float32")
    kept = ops.cast(stochastic_bfloat16(ops.convert_to_tensor(exact), random_bits((4,), 1)), "float32")
    np.testing.assert_array_equal(ops.convert_to_numpy(kept), exact)


def test_random_bits_are_even_and_differ_by_seed():
    a, b = (ops.convert_to_numpy(uniform(random_bits((50_000,), seed))) for seed in (1, 2))
    assert 0 <= a.min() and a.max() < 1
    for x in (a, b):
        np.testing.assert_allclose(np.histogram(x, 10, (0, 1))[0], 5000, rtol=0.06)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02 and abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02


def test_small_updates_move_bfloat16_weights_only_when_rounded_stochastically():
    start, gradients = np.ones((64, 64), "float32"), np.ones((50, 64, 64), "float32")
    with_rounding = stepped(AdamW(1e-4, weight_decay=0.0, stochastic_rounding=True), start, gradients, "bfloat16")
    without = stepped(AdamW(1e-4, weight_decay=0.0), start, gradients, "bfloat16")
    assert (without == 1).all()
    assert with_rounding.mean() == pytest.approx(1 - 50e-4, abs=4e-4)


def test_bfloat16_training_with_stochastic_rounding_follows_mixed_precision():
    *_, mixed = trained(keras.optimizers.AdamW(2e-3), "mixed_bfloat16", epochs=10)
    *_, pure = trained(AdamW(2e-3, stochastic_rounding=True), "bfloat16", epochs=10)
    assert pure[-1] == pytest.approx(mixed[-1], rel=0.1) and pure[-1] < 0.8 * pure[0]


def test_config_and_errors():
    optimizer = AdamW(moments="int8", beta_2=0.99)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is AdamW and again.moments == "int8" and again.beta_2 == 0.99
    assert again.undecayed == ("scale", "bias", "magnitude")
    with pytest.raises(ValueError, match="moments must be None or one of bfloat16, int8, not 'int4'"):
        AdamW(moments="int4")
    with pytest.raises(ValueError, match="amsgrad"):
        AdamW(moments="int8", amsgrad=True)
    with pytest.raises(ValueError, match="weight is float32.*dtype='bfloat16'"):
        AdamW(stochastic_rounding=True).build([keras.Variable(np.ones(3, "float32"), name="weight")])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="about TensorFlow's graph")
@pytest.mark.parametrize("make", [keras.optimizers.AdamW, AdamW])
def test_no_gradient_is_kept_until_others_are_there(make):
    """TensorFlow merges equal operations: if those waited for their gradients, the one would wait for all of them."""
    import tensorflow as tf

    from keras_qwen.training.adam_tensorflow import in_place

    optimizer, variables = make(0.1), [keras.Variable(ops.ones((4, 4)), name=name) for name in "ab"]
    optimizer.build(variables)

    def update(*gradients):
        for variable in variables:
            ops.sin(tf.identity(variable.value))
        with in_place(optimizer, variables):
            optimizer.apply(list(gradients), variables)

    graph = tf.function(update).get_concrete_function(*[tf.TensorSpec((4, 4))] * 2).graph
    kinds = [op.type for op in graph.get_operations()]
    assert kinds.count("ResourceApplyAdam") == 2 and "Pow" in kinds
    waiting = [op.name for op in graph.get_operations() if op.control_inputs and not op.op_def.is_stateful]
    assert waiting == []
    # A variable that is being read cannot be changed where it lies.
    for op in graph.get_operations():
        if op.type in ("ResourceApplyAdam", "ResourceApplyProximalGradientDescent"):
            assert "Sin" in {before.type for before in op.control_inputs}, op.name
