"""Training under `fit`: the loss contract, every kind of input, every precision."""

import warnings

import keras
import numpy as np
import pytest

from keras_qwen import QwenCausalLM, QwenConfig

CONFIG = QwenConfig(
    model_type="qwen2", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
)  # fmt: skip
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 61, (6, 8)).astype("int32")
LABELS = np.roll(IDS, -1, 1)
WEIGHTS = np.zeros((6, 8), "float32")
for _row, _n in enumerate((4, 4, 1, 1, 0, 7)):
    WEIGHTS[_row, :_n] = 1.0
MASK = np.ones_like(IDS)


def fresh(dtype="float32", **settings):
    keras.utils.clear_session(free_memory=False)
    model = QwenCausalLM(CONFIG.replace(**settings) if settings else CONFIG, dtype=dtype)
    rng = np.random.default_rng(3)
    model.set_weights([(rng.normal(0, 0.2, w.shape) + (w.ndim == 1)).astype("float32") for w in model.get_weights()])
    return model


def cross_entropy(model, ids, labels, mask=None):
    inputs = {"token_ids": ids} if mask is None else {"token_ids": ids, "padding_mask": mask}
    logits = keras.ops.convert_to_numpy(keras.ops.cast(model(inputs), "float32")).astype("float64")
    logits -= logits.max(-1, keepdims=True)
    return np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def test_loss_is_one_mean_over_the_tokens_of_all_batches():
    model = fresh()
    ce = cross_entropy(model, IDS, LABELS)
    expected = (ce * WEIGHTS).sum() / WEIGHTS.sum()
    model.compile("sgd")
    for batch_size in (1, 2, 4, 6):  # batches of 4, 1, 0 or 7 tokens: a mean of batches' means would differ
        logs = model.evaluate(IDS, LABELS, sample_weight=WEIGHTS, batch_size=batch_size, verbose=0, return_dict=True)
        assert logs["loss"] == pytest.approx(expected, rel=1e-5), batch_size


def test_weights_default_to_the_next_token_being_real_and_of_the_same_document():
    model = fresh()
    model.compile("sgd")
    mask = np.array([[1] * 5 + [0] * 3, [0] * 2 + [1] * 6])
    counted = np.zeros((2, 8))
    counted[0, :4], counted[1, 2:8] = 1, 1
    ce = cross_entropy(model, IDS[:2], LABELS[:2], mask)
    expected = (ce * counted).sum() / counted.sum()
    inputs = {"token_ids": IDS[:2], "padding_mask": mask}
    assert model.evaluate(inputs, LABELS[:2], verbose=0)[0] == pytest.approx(expected, rel=1e-5)
    segments = np.array([[1, 1, 1, 2, 2, 0, 0, 0]])
    logits = model.predict({"token_ids": IDS[:1], "segment_ids": segments}, verbose=0).astype("float64")
    logits -= logits.max(-1, keepdims=True)
    ce = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, LABELS[:1, :, None], -1)[..., 0]
    inputs = {"token_ids": IDS[:1], "segment_ids": segments}
    assert model.evaluate(inputs, LABELS[:1], verbose=0)[0] == pytest.approx(ce[0, [0, 1, 3]].mean(), rel=1e-5)


def test_negative_labels_and_row_weights():
    model = fresh()
    model.compile("sgd")
    labels = np.where(WEIGHTS > 0, LABELS, -100)
    expected = model.evaluate(IDS, LABELS, sample_weight=WEIGHTS, verbose=0)[0]
    assert model.evaluate(IDS, labels, verbose=0)[0] == pytest.approx(expected, rel=1e-5)
    rows = np.array([1, 0, 0, 2, 0, 0], "float32")
    model.compile("sgd")
    ce = cross_entropy(model, IDS, LABELS)
    expected = (ce * rows[:, None]).sum() / (rows.sum() * 8)
    assert model.evaluate(IDS, LABELS, sample_weight=rows, verbose=0)[0] == pytest.approx(expected, rel=1e-5)


def tf_data(batches):
    import tensorflow as tf

    return tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=tf.nest.map_structure(lambda a: tf.TensorSpec((None, 8), a.dtype), batches[0]),
    )


def grain_data(batches):
    import grain

    return grain.MapDataset.source(batches)


def py_dataset(batches):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    return Batches()


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says so of every dataset without a length
@pytest.mark.parametrize(
    "make", [list, tf_data, grain_data, py_dataset], ids=["generator", "tf.data", "grain", "PyDataset"]
)
def test_every_kind_of_dataset_trains_alike(make):
    inputs = {"token_ids": IDS, "padding_mask": MASK}
    arrays = fresh()
    arrays.compile(keras.optimizers.AdamW(1e-3))
    expected = arrays.fit(inputs, LABELS, sample_weight=WEIGHTS, batch_size=2, shuffle=False, verbose=0).history["loss"]
    batches = [
        ({k: v[i : i + 2] for k, v in inputs.items()}, LABELS[i : i + 2], WEIGHTS[i : i + 2]) for i in range(0, 6, 2)
    ]
    model = fresh()
    model.compile(keras.optimizers.AdamW(1e-3))
    data = (b for b in batches) if make is list else make(batches)
    assert model.fit(data, shuffle=False, verbose=0).history["loss"] == pytest.approx(expected, rel=1e-5)
    for a, b in zip(model.get_weights(), arrays.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_keras_loss_gets_logits():
    model = fresh()
    model.compile(keras.optimizers.SGD(1.0), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ours = fresh()
    ours.compile(keras.optimizers.SGD(1.0))
    losses = [m.fit(IDS, LABELS, batch_size=6, verbose=0).history["loss"][0] for m in (model, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(model.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_batch_without_trained_tokens_has_loss_zero_and_changes_nothing():
    model = fresh()
    model.compile(keras.optimizers.SGD(1.0))
    before = model.get_weights()
    history = model.fit(IDS, LABELS, sample_weight=np.zeros_like(WEIGHTS), batch_size=3, verbose=0).history
    assert history["loss"] == [0.0] and history["token_accuracy"] == [0.0]
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "labels, weights, words",
    [
        (LABELS[:, :5], None, "labels have shape"),
        (LABELS[..., None], None, "labels have shape"),
        (LABELS, WEIGHTS[:, :5], "loss weights have shape"),
        (None, None, "need labels"),
    ],
)
def test_shapes_that_do_not_fit(labels, weights, words):
    model = fresh()
    model.compile("sgd")
    with pytest.raises(ValueError, match=words):
        model.fit(IDS, labels, sample_weight=weights, verbose=0)


def test_metrics_without_logits_are_refused():
    with pytest.raises(ValueError, match="metrics need logits"):
        fresh().compile("sgd", metrics=["accuracy"])


# micro-batches -------------------------------------------------------------------------------------------------------


def three_steps(optimizer, dtype="float32", **compile_arguments):
    model = fresh(dtype)
    model.compile(optimizer(), **compile_arguments)
    inputs = {"token_ids": IDS, "padding_mask": MASK}
    history = model.fit(inputs, LABELS, sample_weight=WEIGHTS, batch_size=6, epochs=3, verbose=0).history
    return model.get_weights(), history


@pytest.mark.parametrize(
    "optimizer, sizes",
    [
        (lambda: keras.optimizers.AdamW(1e-3), (1, 3)),
        (lambda: keras.optimizers.AdamW(1e-3, global_clipnorm=0.1), (2,)),
        (lambda: keras.optimizers.AdamW(1e-3, clipnorm=0.01, use_ema=True, ema_overwrite_frequency=2), (2,)),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), (2,)),
    ],
    ids=["AdamW", "global_clipnorm", "clipnorm and EMA", "SGD"],
)
def test_micro_batches_equal_the_whole_batch(optimizer, sizes):
    whole, history = three_steps(optimizer)
    for size in sizes:
        split, split_history = three_steps(optimizer, micro_batch_size=size)
        assert split_history["loss"] == pytest.approx(history["loss"], rel=1e-5)
        assert split_history["token_accuracy"] == pytest.approx(history["token_accuracy"], abs=1e-6)
        difference = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(split, whole, strict=True)))
        assert difference <= 1e-6 * np.sqrt(sum((b**2).sum() for b in whole)), size


def test_last_smaller_batch_and_evaluate_are_filled_up():
    results = []
    for size in (None, 2):
        model = fresh()
        model.compile(keras.optimizers.SGD(0.1), micro_batch_size=size)
        fit = model.fit(IDS[:5], LABELS[:5], sample_weight=WEIGHTS[:5], batch_size=4, shuffle=False, verbose=0)
        evaluated = model.evaluate(IDS[:5], LABELS[:5], batch_size=5, verbose=0)
        results.append([fit.history["loss"][0], *evaluated, *(w.sum() for w in model.get_weights())])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_micro_batches_that_do_not_divide():
    model = fresh()
    model.compile("sgd", micro_batch_size=4)
    with pytest.raises(ValueError, match="micro_batch_size=4 does not divide the batch of 6 rows"):
        model.fit(IDS, LABELS, batch_size=6, verbose=0)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="micro_batch_size must be a positive integer"):
            model.compile("sgd", micro_batch_size=wrong)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), micro_batch_size=1)
    with pytest.raises(ValueError, match="leave out loss"):
        model.compile("sgd", loss="sparse_categorical_crossentropy", micro_batch_size=1)


# precision -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_mixed_precision_follows_float32(dtype, micro_batch_size):
    full, _ = three_steps(lambda: keras.optimizers.AdamW(1e-3))
    mixed, history = three_steps(lambda: keras.optimizers.AdamW(1e-3), dtype, micro_batch_size=micro_batch_size)
    start = fresh().get_weights()
    assert all(w.dtype == np.float32 for w in mixed)
    moved, expected = (np.concatenate([(a - b).ravel() for a, b in zip(w, start, strict=True)]) for w in (mixed, full))
    cosine = moved @ expected / np.linalg.norm(moved) / np.linalg.norm(expected)
    assert cosine > 0.9 and 0.9 < np.linalg.norm(moved) / np.linalg.norm(expected) < 1.1
    assert history["loss"][2] < history["loss"][0]


def test_float16_overflow_skips_the_step_and_recovers():
    model = fresh("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-2), initial_scale=2.0**40)
    model.compile(optimizer)
    before = model.get_weights()
    model.fit(IDS, LABELS, batch_size=6, verbose=0)  # gradients times 2 ** 40 overflow
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale.value)) == 2.0**39
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    losses = model.fit(IDS, LABELS, batch_size=6, epochs=40, verbose=0).history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.01
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale.value)) < 2.0**35


def test_mixed_float16_gets_a_loss_scale_by_itself():
    model = fresh("mixed_float16")
    model.compile("adamw")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_pure_bfloat16_warns_that_updates_vanish():
    model = QwenCausalLM(CONFIG, dtype="bfloat16")
    with pytest.warns(UserWarning, match="updates smaller than 1/256 of a weight vanish"):
        model.compile(keras.optimizers.AdamW(1e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fresh("mixed_bfloat16").compile(keras.optimizers.AdamW(1e-5))


@pytest.mark.parametrize("remat", [None, "block"])
def test_attention_dropout_trains_and_is_off_in_evaluation(remat):
    config = CONFIG.replace(attention_dropout=0.5)
    model = QwenCausalLM(config, dtype="float32", remat=remat)
    model.compile(keras.optimizers.SGD(0.0))
    runs = model.fit(IDS, LABELS, batch_size=6, epochs=3, verbose=0).history["loss"]
    assert len(set(runs)) == 3  # the weights stay, the dropped probabilities do not
    evaluated = [model.evaluate(IDS, LABELS, verbose=0)[0] for _ in range(2)]
    assert evaluated[0] == evaluated[1]
    model.compile(keras.optimizers.AdamW(1e-2))
    losses = model.fit(IDS, LABELS, batch_size=6, epochs=30, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]


def test_frozen_layers_stay():
    model = fresh()
    model.backbone.embed_tokens.trainable = False
    model.get_layer("layers_0").trainable = False
    model.compile(keras.optimizers.SGD(0.1))
    before = {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}
    model.fit(IDS, LABELS, batch_size=6, verbose=0)
    for v in model.weights:
        same = np.array_equal(before[v.path], keras.ops.convert_to_numpy(v))
        assert same == v.path.startswith(("embed_tokens", "layers_0"))


def test_logs_have_the_gradient_norm_before_clipping_and_the_loss_scale():
    class Norms(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append({k: float(v) for k, v in logs.items()})

    def logs_of(optimizer, **compile_arguments):
        seen.clear()
        model = fresh("mixed_float16" if isinstance(optimizer, str) else "float32")
        model.compile(keras.optimizers.SGD(0.0) if isinstance(optimizer, str) else optimizer, **compile_arguments)
        model.fit(IDS, LABELS, sample_weight=WEIGHTS, batch_size=6, verbose=0, callbacks=[Norms()])
        return model, dict(seen[0])

    seen = []
    # One step of SGD moves the weights by the gradient.
    model, logs = logs_of(keras.optimizers.SGD(1.0))
    moved = [a - b for a, b in zip(fresh().get_weights(), model.get_weights(), strict=True)]
    norm = np.sqrt(sum((m.astype("float64") ** 2).sum() for m in moved))
    assert logs["gradient_norm"] == pytest.approx(norm, rel=1e-4) and "loss_scale" not in logs
    for settings in ({"micro_batch_size": 2}, {}):
        _, again = logs_of(keras.optimizers.SGD(1.0, global_clipnorm=0.01), **settings)
        assert again["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    _, half = logs_of("mixed_float16")
    assert half["gradient_norm"] == pytest.approx(norm, rel=0.02)
    assert half["loss_scale"] == 2.0**15
    evaluated = model.evaluate(IDS, LABELS, sample_weight=WEIGHTS, verbose=0, return_dict=True)
    assert set(evaluated) == {"loss", "token_accuracy"}


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the other backends have one way to compile")
@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 2}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_xla_trains_as_the_plain_graph_does(settings, tied):
    """`"auto"` asks for XLA on accelerators only, so the CPU has to be told to."""
    found = []
    for jit_compile in ("auto", True):
        model = fresh(tie_word_embeddings=tied)
        model.compile(keras.optimizers.AdamW(0.01, global_clipnorm=1.0), jit_compile=jit_compile, **settings)
        assert model.jit_compile == (jit_compile is True)
        history = model.fit(IDS[:4], LABELS[:4], sample_weight=WEIGHTS[:4], batch_size=4, epochs=2, verbose=0).history
        found.append((history, model.get_weights()))
    (plain, weights), (compiled, again) = found
    for name in ("loss", "gradient_norm", "token_accuracy"):
        assert compiled[name] == pytest.approx(plain[name], rel=1e-4), name
    for a, b in zip(again, weights, strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)
