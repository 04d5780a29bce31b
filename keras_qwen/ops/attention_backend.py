"""What attention needs of each backend and `keras.ops` does not offer; see `attention_backend_jax` and its like."""

import functools
import importlib

import keras


@functools.cache
def backend_module():
    """The module for the backend that Keras runs on.

    Each of them has these functions:

    - `device()`: "cpu", "gpu" or "tpu", where new tensors go.
    - `matmul_float32(left, right, transpose_left=False, transpose_right=False)`: product of the last two of four
      dimensions, returned in float32. Operands in half precision are not widened where the backend allows it, and
      transposing makes no copies.
    - `softmax(scores)`: over the last dimension; Keras's warns where it has size 1, which a first token's has.
    - `call_with_gradient(forward, backward, settings, inputs, constants)`: `forward(settings, inputs, constants)`
      returns `(output, saved)`, of which the caller gets the output; its gradients of `inputs` are what
      `backward(settings, inputs, constants, saved, output_gradient)` returns. Neither function is differentiated, so
      that their loops keep no history. `settings` is a named tuple without tensors; `constants` may hold `None`.
    - `slice_block(tensor, index, size)`: the `size` tokens from `index * size` on, of a tensor (batch, length, ...).
    - `zero_blocks(count, shape, dtype="float32")`: `count` blocks of zeros, which a loop may read and write one by one:
      `read_block(blocks, index)`, `write_block(blocks, index, values)` (the result takes the place of `blocks`) and, at
      the end, `stack_blocks(blocks)`, one tensor (count, ...).
    - `flash_attention(query, key, value, *, segment_ids, sliding_window, causal, scale)`: the fused kernel; on the
      backends that have one.
    """
    return importlib.import_module(f"keras_qwen.ops.attention_backend_{keras.backend.backend()}")
