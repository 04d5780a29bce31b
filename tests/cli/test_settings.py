"""Settings from YAML and flags: names, types, defaults and messages."""

import pytest
import yaml

from keras_qwen.cli.finetune_settings import Lora, Settings
from keras_qwen.cli.settings import build, leaves, merged, read_yaml, to_yaml

NEEDED = dict(model="m", data="d.jsonl", output="o")


def built(**content):
    return build(Settings, {**NEEDED, **content}, "run.yaml")


def test_names_are_those_of_the_python_arguments():
    import inspect

    import keras_qwen as kq

    lora = inspect.signature(kq.QwenCausalLM.enable_lora).parameters
    dataset = inspect.signature(kq.data.ChatDataset).parameters
    loading = inspect.signature(kq.QwenCausalLM.from_pretrained).parameters
    checkpoint = inspect.signature(kq.callbacks.Checkpoint).parameters
    optimizer = {*inspect.signature(kq.training.AdamW).parameters, *kq.training.AdamW().get_config()}
    for path in leaves(Settings):
        section, _, name = path.rpartition(".")
        known = {"lora": lora, "optimizer": optimizer, "checkpoint": checkpoint}.get(section, {name})
        if path in ("sequence_length", "batch_size", "packing", "too_long", "on_error", "workers", "seed"):
            known = dataset
        if path in ("dtype", "remat", "quantization"):
            known = loading
        assert name in known, path


def test_flags_go_before_the_file(tmp_path):
    (tmp_path / "run.yaml").write_text("model: m\nlora: {rank: 4, alpha: 8}\nepochs: 3\n")
    content = merged(read_yaml(tmp_path / "run.yaml"), {"data": "d.jsonl", "output": "o", "lora.rank": "2"})
    settings = build(Settings, content, "here")
    assert (settings.lora, settings.epochs, settings.data) == (Lora(rank=2, alpha=8.0), 3, "d.jsonl")


@pytest.mark.parametrize(
    ("content", "path", "value"),
    [
        ({"optimizer": {"learning_rate": "2e-4"}}, "optimizer.learning_rate", 2e-4),  # a text to YAML 1.1
        ({"optimizer": {"global_clipnorm": "none"}}, "optimizer.global_clipnorm", None),
        ({"packing": None}, "packing", None),
        ({"packing": "none"}, "packing", None),
        ({"remat": "2"}, "remat", 2),
        ({"remat": "block"}, "remat", "block"),
        ({"epochs": 2.0}, "epochs", 2),
        ({"lora": {"targets": "[q_proj, v_proj]"}}, "lora.targets", ["q_proj", "v_proj"]),
        ({"lora": {"targets": r"[a-z.]+\.q_proj"}}, "lora.targets", r"[a-z.]+\.q_proj"),
        ({"lora": {"rank_pattern": "{q_proj: 4}"}}, "lora.rank_pattern", {"q_proj": 4}),
        ({"lora": {"use_dora": "true"}}, "lora.use_dora", True),
        ({"data": ["a.jsonl", "b.jsonl"]}, "data", ["a.jsonl", "b.jsonl"]),
        ({"checkpoint": {"every": "50"}}, "checkpoint.every", 50),
    ],
)
def test_values(content, path, value):
    settings = built(**content)
    for name in path.split("."):
        settings = getattr(settings, name)
    assert settings == value and type(settings) is type(value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"lora": {"rnk": 4}}, "run.yaml: there is no setting lora.rnk. Did you mean lora.rank?"),
        ({"learning_rate": 1}, "there is no setting learning_rate. Did you mean optimizer.learning_rate?"),
        ({"batchsize": 1}, "there is no setting batchsize. Did you mean batch_size?"),
        ({"optimizer": {"lr_rate": 1}}, "Did you mean optimizer.learning_rate?"),
        ({"zzz": 1}, "there is no setting zzz. There are model, data, output"),
        ({"batch_size": "many"}, "batch_size is 'many'; it must be int."),
        ({"epochs": 1.5}, "epochs is 1.5; it must be int."),
        ({"epochs": True}, "epochs is True; it must be int."),
        ({"lora": {"use_dora": 1}}, "lora.use_dora is 1; it must be bool."),
        ({"lora": 16}, "lora is a section; write lora.rank, lora.alpha"),
        ({"model": None}, "model is None; it must be str."),
        ({"method": "rlhf"}, "method is 'rlhf'; it must be one of sft, pretrain, dpo."),
        ({"schedule": {"name": "linear"}}, "schedule.name is 'linear'; it must be one of cosine, wsd, constant."),
        ({"quantization": "nf4"}, "add a lora section"),
        ({"method": "dpo"}, "add a lora section"),
        ({"method": "dpo", "lora": {}, "packing": "best_fit"}, "leave out packing"),
        ({"beta": 0.5}, "beta is a setting of dpo"),
        ({"schedule": {"decay_steps": 5}}, "schedule.decay_steps is one of wsd"),
        ({"schedule": {"name": "constant", "final": 0.5}}, "constant ends at the peak"),
    ],
)
def test_refused(content, text):
    with pytest.raises(ValueError) as error:
        built(**content)
    assert text in str(error.value)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="run.yaml: data is missing"):
        build(Settings, {"model": "m", "output": "o"}, "run.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [x\n", "run.yaml, line 2: not valid YAML"),
        ("- a\n- b\n", "must hold settings, one `name: value` a line, not a list"),
    ],
)
def test_files_that_are_no_settings(text, message, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError) as error:
        read_yaml(tmp_path / "run.yaml")
    assert message in str(error.value) and str(tmp_path / "run.yaml") in str(error.value)


def test_defaults_that_depend_on_others():
    assert built().resolved().optimizer.learning_rate == 1e-5
    lora = built(lora={}).resolved()
    assert (lora.optimizer.learning_rate, lora.packing, lora.too_long, lora.schedule.final) == (
        2e-4,
        "best_fit",
        "raise",
        0.1,
    )
    dpo = built(method="dpo", lora={}).resolved()
    assert (dpo.optimizer.learning_rate, dpo.packing, dpo.beta) == (5e-6, None, 0.1)
    assert built(method="pretrain").resolved().too_long == "split"
    assert built(schedule={"name": "constant"}).resolved().schedule.final is None


def test_written_settings_read_back_the_same():
    settings = built(lora={"rank": 3}, optimizer={"learning_rate": 1e-7}).resolved()
    assert build(Settings, yaml.safe_load(to_yaml(settings)), "again") == settings
