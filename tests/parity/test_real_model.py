"""The real 0.5 B checkpoint through our hands: byte for byte the same, and the same to transformers.

It runs where ../shared/real_model/fetch.py has put the checkpoint (QWEN_CHECKPOINT names another folder).
"""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from keras_qwen import QwenCausalLM

CHECKPOINT = Path(os.environ.get("QWEN_CHECKPOINT") or Path.home() / ".cache/keras_qwen/qwen2.5-coder-0.5b-instruct")
pytestmark = pytest.mark.skipif(
    not (CHECKPOINT / "config.json").exists(),
    reason="the real-model check could not run: the checkpoint is not on this machine",
)


def raw_tensors(folder):
    for file in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
def test_untouched_tensors_are_byte_identical(tmp_path, dtype):
    model = QwenCausalLM.from_pretrained(CHECKPOINT, dtype=dtype)
    model.save_pretrained(tmp_path / "out", max_shard_size="300MB")
    del model
    gc.collect()
    written = dict(raw_tensors(tmp_path / "out"))
    for name, tensor in raw_tensors(CHECKPOINT):
        other = written.pop(name)
        assert other.dtype == tensor.dtype and torch.equal(other.view(torch.int16), tensor.view(torch.int16)), name
    assert not written
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (CHECKPOINT / name).read_bytes()
    if dtype == "float32":
        ids = AutoTokenizer.from_pretrained(tmp_path / "out")("def add(a, b):", return_tensors="pt").input_ids
        with torch.no_grad():
            logits = [
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits.numpy()
                for folder in (CHECKPOINT, tmp_path / "out")
            ]
        np.testing.assert_array_equal(*logits)
