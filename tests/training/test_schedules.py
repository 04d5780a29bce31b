"""WarmupStableDecay against the formula, in numbers."""

import keras
import numpy as np
import pytest

from keras_qwen.training import WarmupStableDecay


def rates(schedule, steps):
    return [float(keras.ops.convert_to_numpy(schedule(step))) for step in steps]


def test_rises_stays_and_falls():
    schedule = WarmupStableDecay(0.2, steps=100, warmup_steps=10, decay_steps=20, final=0.1)
    expected = [0.0, 0.1, 0.2, 0.2, 0.2, 0.2 * 0.55, 0.02, 0.02]
    assert rates(schedule, (0, 5, 10, 50, 80, 90, 100, 130)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("decay", "quarter"), [("linear", 0.75), ("cosine", 0.85355339), ("sqrt", 0.5)])
def test_shapes_of_the_decay(decay, quarter):
    schedule = WarmupStableDecay(1.0, steps=40, decay_steps=40, decay=decay)
    assert rates(schedule, (0, 10, 40)) == pytest.approx([1.0, quarter, 0.0], abs=1e-6)


def test_without_warmup_and_decay_it_is_constant():
    assert rates(WarmupStableDecay(0.5, steps=3), range(5)) == [0.5] * 5


def test_is_saved_with_the_optimizer():
    optimizer = keras.optimizers.SGD(WarmupStableDecay(1.0, steps=10, warmup_steps=4, decay_steps=2, decay="sqrt"))
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()
    variable = keras.Variable(np.zeros(1, "float32"))
    for _ in range(3):
        again.apply([keras.ops.ones(1)], [variable])
    assert float(keras.ops.convert_to_numpy(variable)[0]) == pytest.approx(-(0 + 0.25 + 0.5))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(warmup_steps=6, decay_steps=5), "warmup_steps=6 and decay_steps=5"),
        (dict(warmup_steps=-1), "warmup_steps=-1"),
        (dict(decay="exponential"), "decay must be"),
        (dict(final=1.5), "final must lie"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        WarmupStableDecay(1.0, steps=10, **settings)
