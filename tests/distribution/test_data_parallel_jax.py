"""data_parallel on JAX: a mesh with one axis."""

import numpy as np

TRAIN = """
config = kq.QwenConfig.from_pretrained(arguments["folder"])
rng = np.random.default_rng(1)
ids = rng.integers(0, config.vocab_size, (8, 9)).astype("int32")
weights = (rng.random((8, 8)) > np.linspace(0, 0.9, 8)[:, None]).astype("float32")

def train():
    model = kq.QwenCausalLM.from_pretrained(arguments["folder"], dtype="float32")
    model.compile(keras.optimizers.SGD(0.1))
    rows = dict(sample_weight=weights, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.fit(ids[:, :-1], ids[:, 1:], **rows).history["loss"]

def failure(action):
    try:
        action()
    except ValueError as problem:
        return str(problem)

distribution = kq.distribution.data_parallel(config, 4)
with distribution.scope():
    split = train()
report(
    one=train(), split=split, mesh=distribution.mesh, every=kq.distribution.data_parallel(config).mesh,
    many=failure(lambda: kq.distribution.data_parallel(config, 9)),
    none=failure(lambda: kq.distribution.data_parallel(config, 0)),
)
"""


def test_weighted_by_tokens_over_all_devices(on_devices, reference_folder):
    [found] = on_devices(TRAIN, folder=str(reference_folder("qwen2_tied")))
    np.testing.assert_allclose(found["split"], found["one"], rtol=1e-5)
    assert found["mesh"] == {"data": 4} and found["every"] == {"data": 8}
    assert "there are 8 devices" in found["many"] and "there are 8 devices" in found["none"]
