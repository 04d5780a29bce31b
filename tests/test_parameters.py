"""The parameter table: every variable has exactly one row, every row a variable, and transforms invert."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from keras_qwen import QwenBackbone, QwenCausalLM, QwenConfig
from keras_qwen.parameters import IDENTITY, TRANSPOSE, match_variables, parameter_table

SHAPE = dict(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
CONFIGS = {
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=False),
    "qwen2 tied": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", head_dim=10, tie_word_embeddings=False),
    "qwen3 tied": dict(model_type="qwen3", head_dim=10, tie_word_embeddings=True),
    "qwen3 with biases": dict(model_type="qwen3", head_dim=10, attention_bias=True),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("cls", [QwenCausalLM, QwenBackbone])
def test_rows_and_variables_match_one_to_one(kind, cls):
    config = QwenConfig(**SHAPE, **CONFIGS[kind])
    model = cls(config, dtype="float32")
    table = cls.parameter_table(config)
    matched = match_variables(table, model.variables)
    assert len(table) == len(model.variables) == len({id(v) for v in matched.values()})
    assert len({row.hf_name for row in table}) == len(table)
    assert sum(row.size for row in table) == model.count_params()


@pytest.mark.parametrize("name", ["qwen2", "qwen2_tied", "qwen3", "qwen3_tied"])
def test_names_and_shapes_are_those_of_the_checkpoints(reference_folder, name):
    folder = reference_folder(name)
    table = parameter_table(QwenConfig.from_pretrained(folder))
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    assert {row.hf_name: list(row.hf_shape) for row in table} == {n: e["shape"] for n, e in header.items()}


@pytest.mark.parametrize("transform", [IDENTITY, TRANSPOSE])
@given(array=arrays.arrays("int16", st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_transforms_invert(transform, array):
    np.testing.assert_array_equal(transform.inverse(transform.forward(array)), array)
    np.testing.assert_array_equal(transform.forward(transform.inverse(array)), array)


def test_a_table_of_another_config_is_refused():
    model = QwenCausalLM(QwenConfig(**SHAPE), dtype="float32")
    for change, words in [
        (dict(num_hidden_layers=3), "no variable for .*layers_2"),
        (dict(num_hidden_layers=1), "layers_1/.* has no row"),
        (dict(intermediate_size=21), "has shape"),
        (dict(tie_word_embeddings=True), "lm_head/kernel has no row"),
    ]:
        table = parameter_table(QwenConfig(**SHAPE | change))
        with pytest.raises(ValueError, match=words):
            match_variables(table, model.variables)
    with pytest.raises(ValueError, match="both match the row"):
        match_variables(parameter_table(model.config), [*model.variables, model.variables[0]])
