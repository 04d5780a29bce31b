"""Batches that a mesh does not divide: filled up where that changes nothing, else refused."""

import numpy as np

BATCHES = """
config = kq.QwenConfig.from_pretrained(arguments["folder"])
rng = np.random.default_rng(1)
ids = rng.integers(0, config.vocab_size, (11, 9)).astype("int32")
inputs = {"token_ids": ids[:, :-1], "segment_ids": np.ones_like(ids[:, 1:])}

def failure(action):
    try:
        action()
    except ValueError as problem:
        return str(problem)

def run(mesh):
    keras.distribution.set_distribution(None if mesh is None else kq.distribution.model_parallel(config, mesh))
    random.seed(3), np.random.seed(3)
    model = kq.QwenCausalLM.from_pretrained(arguments["folder"], dtype="float32")
    found = {"predicted": model.predict(inputs, batch_size=6, verbose=0).tolist()}
    model.compile(keras.optimizers.AdamW(1e-3))
    weights = np.linspace(0.5, 1.0, 11)
    history = model.fit(inputs, ids[:, 1:], sample_weight=weights, batch_size=6, epochs=2, verbose=0,
                        validation_data=(inputs, ids[:, 1:])).history
    found["history"] = [history[name] for name in ("loss", "val_loss", "val_token_accuracy")]
    model.compile(keras.optimizers.AdamW(1e-3), loss=kq.training.DPO())
    model.enable_lora(2)
    pairs = dict(x=ids[:10, :-1], y=ids[:10, 1:], batch_size=10, shuffle=False, verbose=0)
    found["pairs"] = model.fit(**pairs).history["loss"]
    if mesh is not None:
        model.compile("sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        found["refused"] = failure(lambda: model.fit(inputs, ids[:, 1:], batch_size=8, verbose=0))
        found["on batch"] = failure(lambda: model.train_on_batch(inputs, ids[:, 1:]))
    return found

report(one=run(None), split=run({"data": 4, "model": 2}))
"""


def test_batches_are_filled_up_where_that_changes_nothing(on_devices, small_checkpoint):
    [result] = on_devices(BATCHES, folder=small_checkpoint)
    one, split = result["one"], result["split"]
    assert np.shape(split["predicted"])[:2] == (11, 8)
    np.testing.assert_allclose(split["predicted"], one["predicted"], atol=3e-5)
    for name in ("history", "pairs"):
        np.testing.assert_allclose(split[name], one[name], rtol=2e-5)
    for name, rows in (("refused", 3), ("on batch", 11)):
        assert f"A batch of {rows} rows cannot be split over the mesh {{'data': 4, 'model': 2}}" in split[name]
        assert "choose a batch_size that is a multiple of 4" in split[name]
