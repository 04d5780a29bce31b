"""What attention needs of torch; `attention_backend` says what each function does."""

import torch
from keras import ops

from keras_qwen.ops.attention_mask import attention_mask


def device():
    return "gpu" if torch.cuda.is_available() else "cpu"


def matmul_float32(left, right, transpose_left=False, transpose_right=False):
    return torch.matmul(left.mT if transpose_left else left, right.mT if transpose_right else right).float()


def softmax(scores):
    return torch.softmax(scores, -1)


def call_with_gradient(forward, backward, settings, inputs, constants):
    return _WithGradient.apply(forward, backward, settings, constants, *inputs)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, forward, backward, settings, constants, *inputs):
        output, saved = forward(settings, inputs, constants)
        context.save_for_backward(*inputs, *saved)
        context.rest = backward, settings, constants, len(inputs)
        return output

    @staticmethod
    def backward(context, output_gradient):
        backward, settings, constants, count = context.rest
        tensors = context.saved_tensors  # once: under checkpointing, this is what computes them again
        inputs, saved = tensors[:count], tensors[count:]
        return None, None, None, None, *backward(settings, inputs, constants, saved, output_gradient)


def slice_block(tensor, index, size):
    return tensor[:, index * size : (index + 1) * size]


def zero_blocks(count, shape, dtype="float32"):
    return ops.zeros((count, *shape), dtype=dtype)  # on Keras's device


def read_block(blocks, index):
    return blocks[index]


def write_block(blocks, index, values):
    blocks[index] = values
    return blocks


def stack_blocks(blocks):
    return blocks


def flash_attention(query, key, value, *, segment_ids, sliding_window, causal, scale):
    mask = None
    if segment_ids is not None or sliding_window is not None:
        # In this mask, padding sees padding: a row that sees nothing would divide by zero.
        segments = None if segment_ids is None else segment_ids + 1
        mask = attention_mask(segments, query.shape[1], sliding_window, causal)[:, None]
    output = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    ).transpose(1, 2)
    return output if segment_ids is None else output * (segment_ids > 0)[:, :, None, None]
