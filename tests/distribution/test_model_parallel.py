"""Training on a mesh is training on one device: simulated devices, in a process of their own."""

import numpy as np
import pytest

TRAIN = """
config = kq.QwenConfig.from_pretrained(arguments["folder"])
rng = np.random.default_rng(1)
ids = rng.integers(0, config.vocab_size, (8, 17)).astype("int32")
weights = (rng.random((8, 16)) > 0.3).astype("float32")
segments = np.sort(rng.integers(0, 3, (8, 16))).astype("int32")
inputs = {"token_ids": ids[:, :-1], "segment_ids": segments}

def bytes_of(variables):
    return sum(v.value.addressable_shards[0].data.nbytes for v in variables if len(v.shape) > 1)

def run(mesh, lora=None, remat=None, micro=None, moments=None, dtype="float32", **options):
    keras.utils.set_random_seed(0)
    distribution = kq.distribution.model_parallel(config, mesh, **options) if mesh else None
    keras.distribution.set_distribution(distribution)
    model = kq.QwenCausalLM.from_pretrained(arguments["folder"], dtype=dtype, remat=remat)
    if lora:
        model.enable_lora(lora)
        for v in model.trainable_variables:
            v.assign(np.random.default_rng(len(v.path)).normal(0, 0.05, v.shape))
    model.compile(kq.training.AdamW(1e-3, moments=moments), micro_batch_size=micro)
    history = model.fit(inputs, ids[:, 1:], sample_weight=weights, batch_size=8, epochs=3, shuffle=False, verbose=0)
    found = {"loss": history.history["loss"], "norm": history.history["gradient_norm"]}
    found["evaluated"] = model.evaluate(inputs, ids[:, 1:], sample_weight=weights, batch_size=8, verbose=0)
    found["weights"] = bytes_of(model.trainable_variables)
    found["state"] = bytes_of(model.optimizer.variables)
    if not lora and dtype == "float32":
        prompts = [ids[0, :5].tolist(), ids[1, :3].tolist()]
        found["generated"] = model.generate(prompts, max_new_tokens=6, temperature=0, stop=[])
        found["text"] = [float(keras.ops.convert_to_numpy(v).sum()) for v in model.trainable_variables[:9]]
    report_of = kq.distribution.report(model)
    found["reported"] = sum(r.device_bytes for r in report_of.rows if len(r.shape) > 1 and "lora" not in r.path)
    return found

report(**{name: run(**case) for name, case in arguments["cases"].items()})
"""
PLAIN = {
    "one": dict(mesh=None),
    "tensor and fsdp": dict(mesh={"fsdp": 4, "model": 2}, sequence_parallel=True, remat="block"),
    "all axes": dict(mesh={"model": 2, "data": 2, "fsdp": 2}, micro=4, shard_optimizer=True),
    "zero": dict(mesh={"data": 8}, shard_optimizer=True),
    "kv heads whole": dict(mesh={"data": 2, "model": 4}, remat="attention"),
}


@pytest.fixture(scope="module")
def plain(on_devices, reference_folder):
    return on_devices(TRAIN, folder=str(reference_folder("qwen2_tied")), cases=PLAIN)[0]


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "one"])
def test_same_numbers(plain, name):
    one, split = plain["one"], plain[name]
    for what in ("loss", "norm", "evaluated"):
        np.testing.assert_allclose(split[what], one[what], rtol=2e-5)
    np.testing.assert_allclose(split["text"], one["text"], atol=2e-3)
    assert split["generated"] == one["generated"]


def test_bytes_on_each_device(plain):
    whole = plain["one"]["weights"]
    assert plain["one"]["state"] == 2 * whole
    assert plain["tensor and fsdp"]["weights"] == whole / 8 and plain["tensor and fsdp"]["state"] == 2 * whole / 8
    assert plain["zero"]["weights"] == whole and plain["zero"]["state"] == 2 * whole / 8
    for name, case in PLAIN.items():
        if case["mesh"]:
            assert plain[name]["reported"] == plain[name]["weights"]


def test_adapters_and_small_moments(on_devices, reference_folder):
    mesh = {"fsdp": 2, "model": 4}
    cases = {
        "one": dict(mesh=None, lora=4),
        "split": dict(mesh=mesh, lora=4, remat="block", sequence_parallel=True),
        "one, bfloat16 moments": dict(mesh=None, moments="bfloat16"),
        "split, bfloat16 moments": dict(mesh=mesh, moments="bfloat16"),
        "split, half precision": dict(mesh=mesh, dtype="mixed_bfloat16"),
        "one, half precision": dict(mesh=None, dtype="mixed_bfloat16"),
    }
    [found] = on_devices(TRAIN, folder=str(reference_folder("qwen3")), cases=cases)
    np.testing.assert_allclose(found["split"]["loss"], found["one"]["loss"], rtol=2e-5)
    assert found["split"]["loss"][2] < found["split"]["loss"][0]
    for what, tolerance in (("bfloat16 moments", 1e-4), ("half precision", 2e-2)):
        one, split = found[f"one, {what}"], found[f"split, {what}"]
        np.testing.assert_allclose(split["loss"], one["loss"], rtol=tolerance)
    state = found["split, bfloat16 moments"]
    assert state["state"] == state["weights"]  # two of two bytes for one of four


WRONG = """
config = kq.QwenConfig.from_pretrained(arguments["folder"])
ids = np.zeros((8, 9), "int32")

def failure(action):
    try:
        action()
    except ValueError as problem:
        return str(problem)

def trained(prepare=lambda model: None, change=lambda layouts: None, other=None, before=False, **compiled):
    layouts = kq.distribution.layout_map(config, {"data": 4, "model": 2})
    change(layouts)
    distribution = kq.distribution.model_parallel(config, layouts)
    keras.distribution.set_distribution(None if before else distribution)
    model = kq.QwenCausalLM(other or config, dtype="float32")
    keras.distribution.set_distribution(distribution)
    model.compile("sgd", **compiled)
    prepare(distribution)
    model.fit(ids[:, :-1], ids[:, 1:], batch_size=8, verbose=0)

def typo(layouts):
    layouts["layers_9/.*"] = (None,)

def drop(layouts):
    del layouts[layouts.pattern_of("norm/scale")]

def later(distribution):
    layouts = distribution.layouts
    pattern = layouts.pattern_of("layers_0/mlp/up_proj/kernel")
    del layouts[pattern]
    layouts[pattern] = (None, None)

import dataclasses
other = dataclasses.replace(config, rms_norm_eps=1e-3)
report(
    before=failure(lambda: trained(before=True)),
    typo=failure(lambda: trained(change=typo)),
    missing=failure(lambda: trained(change=drop)),
    later=failure(lambda: trained(prepare=later)),
    config=failure(lambda: trained(other=other)),
    micro=failure(lambda: trained(micro_batch_size=2)),
    devices=failure(lambda: kq.distribution.model_parallel(config, {"data": 4, "model": 4})),
    fine=failure(trained),
)
"""


def test_bad_input(on_devices, reference_folder):
    [found] = on_devices(WRONG, folder=str(reference_folder("qwen2_tied")))
    assert "made before this distribution was set" in found["before"]
    assert "match no variable of the model: layers_9/.*" in found["typo"]
    assert "matches no rule" in found["missing"] and "norm/scale" in found["missing"]
    assert "changed after the model was made" in found["later"]
    assert "another config" in found["config"]
    assert "micro_batch_size=2 is no multiple of the 4 parts" in found["micro"]
    assert "needs 16 devices, there are 8" in found["devices"]
    assert found["fine"] is None
