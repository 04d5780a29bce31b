"""NF4: codes of 4 bits for normally distributed weights, with scales that are quantised themselves.

Reference: Dettmers et al., 2023, "QLoRA", arXiv:2305.14314.
"""

import statistics

import numpy as np
from keras import ops

from keras_qwen.ops.quantization_packing import GROUP, Part, grouped, groups_of, pack, ungrouped, unpack

_SCALES = 256  # columns whose scales share a second-level scale


def normal_float_levels():
    """The 16 values of NF4, from -1 to 1, 0 among them: where a normal distribution has equal shares between them.

    Quantiles of the standard normal distribution at evenly spaced probabilities, eight on the positive side and seven
    on the negative, divided by the largest. The outermost probability is the mean of 1 - 1/30 and 1 - 1/32.
    """
    last = 1 - (1 / 30 + 1 / 32) / 2
    quantile = statistics.NormalDist().inv_cdf
    positive = [quantile(p) for p in np.linspace(0.5, last, 9)[1:]]
    negative = [-quantile(p) for p in np.linspace(last, 0.5, 8)[:-1]]
    return np.array([*negative, 0.0, *positive], "float32") / np.float32(positive[-1])


LEVELS = normal_float_levels()
_BETWEEN = (LEVELS[1:] + LEVELS[:-1]) / 2


class NormalFloat4:
    """`level[code] * scale`, the scale being `low + step * scale_code`.

    A group's scale is its largest absolute value, as a code of 8 bits between the smallest and the largest scale of 256
    neighbouring columns. (The paper takes 8-bit floats around a mean; whole steps between the extremes are never
    further off than half a step.) The level codes are chosen for what the scale was rounded to.
    """

    name, bits, columns = "nf4", 4 + 8 / GROUP + 64 / GROUP / _SCALES, _SCALES

    def parts(self, inputs, outputs):
        groups, runs = groups_of(inputs), -(-outputs // _SCALES)
        return {
            "codes": Part((groups * GROUP // 2, outputs), "uint8"),
            "scale_code": Part((groups, outputs), "uint8"),
            "scale_low": Part((groups, runs), "float32", _SCALES),
            "scale_step": Part((groups, runs), "float32", _SCALES),
        }

    def quantize(self, matrix):
        groups = grouped(matrix)
        largest = np.maximum(groups.max(1), -groups.min(1))
        starts = np.arange(0, matrix.shape[1], _SCALES)
        low, high = np.minimum.reduceat(largest, starts, axis=1), np.maximum.reduceat(largest, starts, axis=1)
        step = (high - low) / 255
        low_of, step_of = (np.repeat(x, _SCALES, axis=1)[:, : matrix.shape[1]] for x in (low, step))
        scale_code = np.rint((largest - low_of) / np.where(step_of > 0, step_of, 1)).astype("uint8")
        scale = low_of + step_of * scale_code
        codes = _nearest_levels(groups / np.where(scale > 0, scale, 1)[:, None])
        return {"codes": pack(codes), "scale_code": scale_code, "scale_low": low, "scale_step": step}

    def dequantize(self, parts, inputs, outputs):
        low, step = (ops.repeat(parts[name], _SCALES, axis=1)[:, :outputs] for name in ("scale_low", "scale_step"))
        scale = low + step * ops.cast(parts["scale_code"], "float32")
        levels = ops.take(ops.convert_to_tensor(LEVELS), ops.cast(unpack(parts["codes"]), "int32"))
        return ungrouped(levels * scale[:, None], inputs)


def _nearest_levels(x):
    codes = np.zeros(x.shape, "uint8")
    for value in _BETWEEN:  # comparing with all is ten times faster than a search
        codes += x > value
    return codes
