"""The fused kernels of JAX, as far as they run without their device: what they are given, and what is made of it."""

import keras
import numpy as np
import pytest

from .attention_reference import inputs, reference, visible

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="of JAX; torch's is in test_attention.py")


@pytest.mark.parametrize("segmented", [False, True], ids=["plain", "segments"])
@pytest.mark.parametrize("window, causal", [(None, True), (4, True), (4, False)])
def test_what_cudnn_is_asked_for(monkeypatch, segmented, window, causal):
    import jax

    from keras_qwen.ops.attention_backend_jax import flash_attention

    kernel = jax.nn.dot_product_attention

    def without_a_gpu(*tensors, implementation, **arguments):
        assert implementation == "cudnn"
        assert arguments["mask"] is None or arguments["local_window_size"] is None
        return kernel(*tensors, implementation="xla", **arguments)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_a_gpu)
    arrays = inputs(length=12)
    segments = np.array([[0] * 2 + [1] * 4 + [2] * 6, [1] * 9 + [0] * 3], "int32") if segmented else None
    rule = dict(segment_ids=segments, sliding_window=window, causal=causal)
    output = flash_attention(*arrays[:3], scale=0.5, **rule)
    np.testing.assert_allclose(output, reference(*arrays, visible(12, segments, window, causal))[0], atol=1e-5)


@pytest.mark.parametrize("window, segmented", [(None, True), (70, False)])
def test_splash_attention_in_interpret_mode(window, segmented):
    from keras_qwen.ops.attention_backend_jax import _splash_attention

    arrays = inputs(batch=1, length=128, heads=2, kv_heads=1, head_dim=64)
    segments = np.repeat([[1, 2]], 64, axis=1).astype("int32") if segmented else None
    output = _splash_attention(*arrays[:3], segments, window, True, 64**-0.5, interpret=True)
    np.testing.assert_allclose(output, reference(*arrays, visible(128, segments, window))[0], atol=1e-5)
