"""Rules for all variables of a model, from the parameter table."""

import keras
import pytest

import keras_qwen as kq
from keras_qwen.distribution.layouts import device_mesh, layout_map
from keras_qwen.parameters import parameter_table, quantized_table

CONFIG = kq.QwenConfig(
    model_type="qwen2", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


def mesh(**sizes):
    """A mesh of devices that need not exist."""
    count = 1
    for size in sizes.values():
        count *= size
    return keras.distribution.DeviceMesh(tuple(sizes.values()), tuple(sizes), [f"cpu:{i}" for i in range(count)])


def test_every_row_matches_one_rule():
    layouts = layout_map(CONFIG, mesh(fsdp=2, model=2))
    for row in (*parameter_table(CONFIG), *quantized_table(parameter_table(CONFIG), "nf4")):
        for path in (row.path, f"qwen_causal_lm/{row.path}"):
            assert layouts[path].axes == layouts[layouts.pattern_of(path)].axes
            assert len(layouts[path].axes) == len(row.shape)
    assert layouts["layers_1/self_attn/q_proj/kernel"].axes == ("fsdp", "model")
    assert layouts["layers_0/self_attn/o_proj/kernel"].axes == ("model", "fsdp")
    both = "model" if keras.backend.backend() == "tensorflow" else ("model", "fsdp")  # DTensor takes one axis
    assert layouts["layers_0/mlp/up_proj/lora_mine/B"].axes == (None, both)
    assert layouts["embed_tokens/lora_mine/embeddings"].axes == ("model", "fsdp")
    assert layouts.pattern_of("layers_0/self_attn/x_proj/kernel") is None


def test_the_order_of_the_axes_is_the_meshs():
    layouts = layout_map(CONFIG, mesh(model=2, data=1, fsdp=2))
    assert layouts.mesh == {"model": 2, "data": 1, "fsdp": 2}
    assert layouts["lm_head/kernel"].axes == ("fsdp", "model")


def test_notes_say_what_is_not_split_as_usual():
    layouts = layout_map(CONFIG, mesh(model=4))
    notes = {pattern.split("/")[-2]: note for pattern, note in layouts.notes.items()}
    assert "2 key/value heads" in notes["k_proj"] and "k_proj" in notes and "q_proj" not in notes


def test_two_rules_for_one_variable_raise():
    layouts = layout_map(CONFIG, mesh(model=2))
    layouts[".*q_proj/kernel"] = (None, None)
    with pytest.raises(ValueError, match="several rules"):
        layouts.pattern_of("layers_0/self_attn/q_proj/kernel")


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="needs 512 devices, there are"):
        device_mesh({"data": 8, "model": 64})
    with pytest.raises(ValueError, match="Unknown mesh axes"):
        device_mesh(mesh(rows=2))
