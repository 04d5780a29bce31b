"""Samples: the texts are those of generate, kept, printed and written."""

import json

import pytest

import keras_qwen as kq

from .small_model import CONFIG, IDS, LABELS, fresh


def test_texts_of_each_epoch(tmp_path, capsys):
    model = fresh(config=CONFIG.replace(vocab_size=300))
    model.tokenizer = kq.QwenTokenizer.train(["the sea is warm"], 300)
    prompts = ["the sea", [{"role": "user", "content": "warm?"}]]
    for prompt in prompts:  # one kind at a time, as generate takes them
        samples = kq.callbacks.Samples([prompt], tmp_path / "texts.jsonl", every=2, max_new_tokens=3, seed=1)
        model.fit(IDS, LABELS, epochs=2, verbose=0, callbacks=[samples])
        expected = model.generate([prompt], max_new_tokens=3, temperature=0)
        assert samples.texts == {2: expected}
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert lines[1] == {"epoch": 2, "prompt": prompts[1], "text": expected[0]}
    assert "'warm?'" in capsys.readouterr().out


def test_bad_settings():
    with pytest.raises(ValueError, match="prompts must be a list"):
        kq.callbacks.Samples("one text")
    with pytest.raises(ValueError, match="every must be"):
        kq.callbacks.Samples(["a"], every=0)
