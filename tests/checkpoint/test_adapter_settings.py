"""AdapterSettings: targets, patterns, and what PEFT's adapter_config.json may say."""

import json

import pytest

from keras_qwen import QwenConfig
from keras_qwen.checkpoint.adapter_settings import ALL_PROJECTIONS, AdapterSettings
from keras_qwen.parameters import parameter_table

CONFIG = QwenConfig(
    model_type="qwen2", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
TABLE = parameter_table(CONFIG)
TIED = tuple(row for row in TABLE if row.hf_name != "lm_head.weight")
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def modules(targets, **settings):
    return list(AdapterSettings(4, targets=targets, **settings).modules(TABLE))


def read(tmp_path, **keys):
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PEFT, **keys}))
    return AdapterSettings.from_peft(tmp_path / "adapter_config.json")


def test_default_is_all_projections():
    found = AdapterSettings(4).modules(TABLE)
    assert len(found) == 21 and set(found.values()) == {(4, 1.0)}
    assert {name.rpartition(".")[2] for name in found} == set(ALL_PROJECTIONS)
    assert modules("all-linear") == list(found)


def test_targets_by_name_and_by_regular_expression():
    assert modules(["q_proj"]) == [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
    assert modules(["layers.1.mlp.up_proj"]) == ["model.layers.1.mlp.up_proj"]
    assert modules(r".*layers\.[02]\..*(k|v)_proj") == [
        f"model.layers.{i}.self_attn.{name}" for i in (0, 2) for name in ("k_proj", "v_proj")
    ]


@pytest.mark.parametrize(
    "targets, words",
    [
        (["q_proj", "c_attn"], "'c_attn' matches no projection; there are q_proj, k_proj.*down_proj"),
        (["proj"], "'proj' matches no projection"),
        ("q_proj", "match no projection"),  # one text is a regular expression for the whole name
        (["lm_head"], "not lm_head.*modules_to_save"),
        (["embed_tokens"], "not model.embed_tokens.*modules_to_save"),
    ],
)
def test_unknown_targets_say_what_there_is(targets, words):
    with pytest.raises(ValueError, match=words):
        modules(targets)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"rank": 0}, "positive integer, not 0"),
        ({"rank": 2.5}, "not 2.5"),
        ({"rank": True}, "not True"),
        ({"rank": 4, "alpha": "16"}, "alpha must be a number"),
        ({"rank": 4, "dropout": 1.0}, "dropout"),
        ({"rank": 4, "targets": "("}, "no regular expression"),
        ({"rank": 4, "rank_pattern": {"q_proj": 0}}, "q_proj"),
        ({"rank": 4, "alpha_pattern": {"q_proj": None}}, "q_proj"),
    ],
)
def test_bad_values(settings, words):
    with pytest.raises(ValueError, match=words):
        AdapterSettings(**settings)


def test_ranks_and_scales():
    settings = AdapterSettings(
        4, 8, ["q_proj", "up_proj"], rank_pattern={"up_proj": 16, r"layers\.1\..*q_proj": 2},
        alpha_pattern={"layers.0.self_attn.q_proj": 1},
    )  # fmt: skip
    found = settings.modules(TABLE)
    assert found["model.layers.0.self_attn.q_proj"] == (4, 0.25)
    assert found["model.layers.1.self_attn.q_proj"] == (2, 4.0)
    assert found["model.layers.2.self_attn.q_proj"] == (4, 2.0)
    assert found["model.layers.2.mlp.up_proj"] == (16, 0.5)
    rank_stabilised = AdapterSettings(16, 8, ["q_proj"], use_rslora=True).modules(TABLE)
    assert rank_stabilised["model.layers.0.self_attn.q_proj"] == (16, 2.0)


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_nothing(name):
    settings = AdapterSettings(4, targets=["q_proj"], **{name: {"up_proj": 2}})
    with pytest.raises(ValueError, match=f"{name} 'up_proj' matches none"):
        settings.modules(TABLE)
    assert len(settings.modules(TABLE, strict=False)) == 3  # in a file it does no harm


def test_replaced_modules():
    settings = AdapterSettings(4, modules_to_save=["embed_tokens", "lm_head"])
    assert settings.replaced(TABLE) == ("model.embed_tokens", "lm_head")
    assert settings.replaced(TIED) == ("model.embed_tokens",)
    with pytest.raises(ValueError, match="tied to embed_tokens"):
        AdapterSettings(4, modules_to_save=["lm_head"]).replaced(TIED)
    with pytest.raises(ValueError, match="'norm'"):
        AdapterSettings(4, modules_to_save="norm").replaced(TABLE)


def test_files_round_trip(tmp_path):
    stored = {
        **PEFT, "use_rslora": True, "use_dora": True, "lora_dropout": 0.1, "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"q_proj": 3}, "modules_to_save": ["lm_head"], "base_model_name_or_path": "somewhere",
        "task_type": "CAUSAL_LM", "ensure_weight_tying": False, "peft_version": "0.21.2", "layers_to_transform": None,
    }  # fmt: skip
    settings = read(tmp_path, **stored)
    assert (settings.rank, settings.alpha, settings.dropout) == (4, 8, 0.1)
    again = settings.to_peft()
    assert {key: again[key] for key in stored} == stored
    assert AdapterSettings(**json.loads(json.dumps(settings.to_dict()))) == settings


def test_what_we_write_has_what_peft_needs():
    written = AdapterSettings(4, targets=["v_proj", "q_proj"]).to_peft()
    assert written["peft_type"] == "LORA" and written["task_type"] == "CAUSAL_LM"
    assert (written["r"], written["lora_alpha"], written["target_modules"]) == (4, 4, ["q_proj", "v_proj"])
    assert AdapterSettings(4, targets=".*q_proj").to_peft()["target_modules"] == ".*q_proj"


@pytest.mark.parametrize(
    "key, value",
    [
        ("alora_invocation_tokens", [1, 2]),
        ("arrow_config", {"top_k": 2}),
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("kasa_config", {"beta": 1}),
        ("layer_replication", [[0, 2]]),
        ("lora_bias", True),
        ("target_parameters", ["experts"]),
        ("trainable_token_indices", [3]),
        ("use_bdlora", {"nblocks": 2}),
        ("use_qalora", True),
        ("velora_config", {"num_groups": 2}),
        ("a_key_of_next_year", "on"),
    ],
)
def test_keys_that_change_the_computation_are_refused(tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"adapter_config.json sets {key}="):
        read(tmp_path, **{key: value})


def test_neutral_keys_are_accepted(tmp_path):
    read(
        tmp_path, bias="none", fan_in_fan_out=False, init_lora_weights="gaussian", loftq_config={}, revision="main",
        qalora_group_size=16, megatron_core="megatron.core", a_key_of_next_year=None, inference_mode=True,
    )  # fmt: skip


def test_rarer_choices_of_modules(tmp_path):
    assert len(read(tmp_path, layers_to_transform=[0, 2]).modules(TABLE)) == 4
    assert len(read(tmp_path, layers_to_transform=1, layers_pattern="layers").modules(TABLE)) == 2
    assert len(read(tmp_path, exclude_modules=["v_proj"]).modules(TABLE)) == 3
    assert len(read(tmp_path, exclude_modules=r".*layers\.0.*").modules(TABLE)) == 4
    unknown = read(tmp_path, target_modules=["q_proj", "query_key_value"])
    assert len(unknown.modules(TABLE, strict=False)) == 3


@pytest.mark.parametrize(
    "text, error, words",
    [
        ("{", OSError, "is no adapter_config.json"),
        ("[]", OSError, "is no adapter_config.json"),
        (json.dumps({"peft_type": "IA3"}), ValueError, "peft_type='IA3'"),
        (json.dumps({"peft_type": "LORA", "r": 4}), ValueError, "has no target_modules"),
        (json.dumps({**PEFT, "r": 0}), ValueError, "adapter_config.json: The rank"),
    ],
)
def test_files_that_are_none(tmp_path, text, error, words):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(error, match=words):
        AdapterSettings.from_peft(tmp_path / "adapter_config.json")


def test_a_folder_without_an_adapter(tmp_path):
    with pytest.raises(OSError, match="holds no adapter"):
        AdapterSettings.from_peft(tmp_path / "adapter_config.json")
