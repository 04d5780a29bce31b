"""Checkpoints on a mesh of simulated devices: every device gets its slice, no byte is read twice, all comes back."""

LOADING = """
from keras_qwen.checkpoint.safetensors_files import read_folder

preadv, read = os.preadv, []
def counting(descriptor, buffers, offset):
    read.append(sum(buffer.nbytes for buffer in buffers))
    return preadv(descriptor, buffers, offset)
os.preadv = counting

def differences(model, values):
    return sorted(path for path, value in values_of(model).items() if not np.array_equal(value, values[path]))

def values_of(model):
    return {v.path: keras.ops.convert_to_numpy(v.value) for v in model.variables}

def load(**settings):
    return kq.QwenCausalLM.from_pretrained(arguments["folder"], dtype="float32", **settings)

config = kq.QwenConfig.from_pretrained(arguments["folder"])
whole = load()
whole.save_pretrained(arguments["out"] + "/whole")
plain, quantized = values_of(whole), values_of(load(quantization="int8"))
stored = sum(tensor.nbytes for tensor in read_folder(arguments["folder"]).values())
found = {}
for mesh in ({"fsdp": 8}, {"model": 2, "fsdp": 4}, {"data": 4, "model": 2}):
    keras.distribution.set_distribution(kq.distribution.model_parallel(config, mesh))
    del read[:]
    model = load()
    one = found[str(mesh)] = {"read": sum(read) / stored, "different": differences(model, plain)}
    held = [v.value.addressable_shards[0].data.shape for v in model.variables]
    one["misplaced"] = [
        v.path for v, shape in zip(model.variables, held)
        if not v.value.sharding.is_equivalent_to(v._layout.backend_layout, len(v.shape))
    ]
    one["split"] = sum(np.prod(shape) < np.prod(v.shape) for v, shape in zip(model.variables, held)).item()
    model.save_pretrained(arguments["out"] + "/split")
    files = [open(f"{arguments['out']}/{name}/model.safetensors", "rb").read() for name in ("whole", "split")]
    one["same file"] = files[0] == files[1]
    if mesh == {"model": 2, "fsdp": 4}:
        one["quantized"] = differences(load(quantization="int8"), quantized)
        model.enable_lora(4)
        for variable in model.trainable_variables:
            variable.assign(np.random.default_rng(len(variable.path)).normal(size=variable.shape).astype("float32"))
        values = values_of(model)
        model.save_adapter(arguments["out"] + "/adapter")
        again = load()
        again.load_adapter(arguments["out"] + "/adapter")
        one["adapter"] = differences(again, values)
        keras.distribution.set_distribution(None)
        again = load()
        again.load_adapter(arguments["out"] + "/adapter")
        one["adapter on one device"] = differences(again, values)
report(found=found)
"""


def test_every_device_gets_its_slice_and_all_comes_back(on_devices, reference_folder, tmp_path):
    [result] = on_devices(LOADING, folder=str(reference_folder("qwen2")), out=str(tmp_path / "saved"))
    for mesh, found in result["found"].items():
        assert found["different"] == found["misplaced"] == [], mesh
        assert found["read"] == 1.0, mesh
        assert found["split"] >= 20, mesh
        assert found["same file"], mesh
    of_both = result["found"]["{'model': 2, 'fsdp': 4}"]
    assert of_both["quantized"] == of_both["adapter"] == of_both["adapter on one device"] == []
