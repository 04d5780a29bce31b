"""QwenConfig: what it reads, derives, refuses and writes back."""

import json

import pytest

from keras_qwen.config import QwenConfig

SHAPE = dict(
    vocab_size=157,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
)
OLD_YARN = {
    "model_type": "qwen2",
    **SHAPE,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "torch_dtype": "bfloat16",
}
NEW_YARN = {
    "model_type": "qwen2",
    **SHAPE,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "dtype": "bfloat16",
}


def test_old_and_new_form_mean_the_same():
    assert QwenConfig.from_hf(OLD_YARN) == QwenConfig.from_hf(NEW_YARN)


def test_rope_scaling_with_rope_type_is_the_old_form_too():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert QwenConfig.from_hf(OLD_YARN | {"rope_scaling": scaling}) == QwenConfig.from_hf(NEW_YARN)


@pytest.mark.parametrize("settings", [OLD_YARN, NEW_YARN])
def test_writes_what_it_read_and_what_it_derived(settings):
    written = QwenConfig.from_hf(settings | {"use_cache": True, "eos_token_id": [7, 9]}).to_hf()
    assert written["rope_theta"] == 1000000.0
    assert written["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert written["rope_parameters"] == NEW_YARN["rope_parameters"]
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert written["layer_types"] == ["full_attention"] * 3
    assert written["head_dim"] == 8
    assert written["use_cache"] is True and written["eos_token_id"] == [7, 9]
    assert written["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen2_tied", "qwen2_sliding", "qwen2_yarn", "qwen2_linear", "qwen3", "qwen3_tied"]
)
def test_round_trip_of_the_reference_configs(reference_folder, name):
    config = QwenConfig.from_pretrained(reference_folder(name))
    assert QwenConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    source = json.loads((reference_folder(name) / "config.json").read_text())
    written = config.to_hf()
    for key in source.keys() - {"rope_scaling", "attention_bias"}:
        assert written[key] == source[key], key


@pytest.mark.parametrize(
    "settings",
    [  # the sizes and switches that Hugging Face repositories of these models have
        dict(hidden_size=1536, num_attention_heads=12, max_window_layers=21, sliding_window=4096, use_mrope=False),
        dict(hidden_size=5120, num_attention_heads=40, num_key_value_heads=8, rope_theta=1e6, sliding_window=131072),
        dict(hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, sliding_window=None, rope_theta=10000),
    ],
)
def test_published_settings_of_r1_distill_qwq_and_math(settings):
    defaults = {"num_key_value_heads": 2, "use_sliding_window": False, "model_type": "qwen2", "hidden_act": "silu"}
    config = QwenConfig.from_hf(SHAPE | defaults | settings, require_shapes=True)
    assert config.head_dim == 128
    assert config.window(0) is None and set(config.layer_types) == {"full_attention"}
    assert config.to_hf()["sliding_window"] == settings["sliding_window"]


def test_defaults_are_those_of_transformers():
    qwen2, qwen3 = QwenConfig(model_type="qwen2"), QwenConfig(model_type="qwen3")
    assert (qwen2.vocab_size, qwen2.hidden_size, qwen2.intermediate_size) == (151936, 4096, 22016)
    assert (qwen2.num_hidden_layers, qwen2.num_attention_heads, qwen2.num_key_value_heads) == (32, 32, 32)
    assert (qwen2.max_position_embeddings, qwen2.rope_theta, qwen2.tie_word_embeddings) == (32768, 10000.0, False)
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 128)
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    assert QwenConfig(model_type="qwen3", attention_bias=True).output_bias


def test_sliding_window_from_max_window_layers_and_from_layer_types():
    sliding = dict(use_sliding_window=True, sliding_window=4)
    from_count = QwenConfig(**SHAPE, **sliding, max_window_layers=1)
    from_types = QwenConfig(
        **SHAPE, **sliding, layer_types=["full_attention", "sliding_attention", "sliding_attention"]
    )
    assert [from_count.window(i) for i in range(3)] == [from_types.window(i) for i in range(3)] == [None, 4, 4]


def test_replace_derives_again():
    config = QwenConfig.from_hf(OLD_YARN)
    longer = config.replace(rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16})
    assert longer.rope_parameters["factor"] == 8.0 and longer.rope_theta == 1000000.0
    assert config.replace(num_hidden_layers=5).layer_types == ("full_attention",) * 5
    assert config.replace(rope_theta=5.0).rope_parameters == config.rope_parameters | {"rope_theta": 5.0}
    assert config.replace(num_attention_heads=4).head_dim == 12


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "needs factor"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "type 'linear' and rope_type 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "big"}}, "must be a number"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"use_mrope": True}, "use_mrope"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"model_type": "qwen2_moe"}, "mixture of experts"),
        ({"model_type": "qwen3_moe"}, "mixture of experts"),
        ({"num_key_value_heads": 4}, "no multiple of num_key_value_heads 4"),
        ({"hidden_size": 50}, "hidden_size 50 is no multiple"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"attention_dropout": 1.0}, "attention_dropout"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window is None"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is not set"),
    ],
)
def test_what_changes_the_computation_raises(change, words):
    with pytest.raises(ValueError, match=words):
        QwenConfig.from_hf({"model_type": "qwen2", **SHAPE} | change)


def test_unused_rope_settings_warn():
    with pytest.warns(UserWarning, match="does not use beta_fast"):
        QwenConfig(**SHAPE, rope_scaling={"type": "linear", "factor": 2.0, "beta_fast": 32})


def test_file_that_is_not_json(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        QwenConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a JSON list"):
        QwenConfig.from_pretrained(tmp_path)


def test_file_that_lacks_a_shape_key(tmp_path):
    settings = {"model_type": "qwen2"} | SHAPE
    del settings["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"config\.json: .*lacks hidden_size"):
        QwenConfig.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"config\.json"):
        QwenConfig.from_pretrained(tmp_path / "..")
