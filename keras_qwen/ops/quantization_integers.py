"""int8, a scale for each column, and int4, a scale and a zero point for each 64 entries of a column.

int8 is Keras's own quantiser. Keras's int4 with groups does not serve: it confines the zero point to the codes without
widening the range to hold 0, so that a group of equal weights comes back as zeros; its layer keeps an int8 array of the
kernel's size from the forward to the backward pass; and it gathers scale and zero point for each weight.
"""

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_qwen.ops.quantization_packing import GROUP, Part, grouped, groups_of, pack, ungrouped, unpack


class Int8:
    """Symmetric integers of 8 bits: `scale[column] * code`."""

    name, bits, columns = "int8", 8.0, 1

    def parts(self, inputs, outputs):
        return {"codes": Part((inputs, outputs), "int8"), "scale": Part((outputs,), "float32")}

    def quantize(self, matrix):
        codes, inverse = keras.quantizers.abs_max_quantize(matrix, axis=0, to_numpy=True)
        return {
            "codes": ops.convert_to_numpy(codes),
            "scale": 1 / ops.convert_to_numpy(inverse).reshape(-1),
        }

    def dequantize(self, parts, inputs, outputs):
        return ops.cast(parts["codes"], "float32") * parts["scale"]


class Int4:
    """Asymmetric integers of 4 bits: `scale[group, column] * (code - zero_point[group, column])`.

    The scales are bfloat16 and the codes chosen for what the scale was rounded to. 0 is among a group's values.
    """

    name, bits, columns = "int4", 4 + 24 / GROUP, 1

    def parts(self, inputs, outputs):
        groups = groups_of(inputs)
        return {
            "codes": Part((groups * GROUP // 2, outputs), "uint8"),
            "scale": Part((groups, outputs), "bfloat16"),
            "zero_point": Part((groups, outputs), "uint8"),
        }

    def quantize(self, matrix):
        groups = grouped(matrix)
        low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
        scale = (high / 15 - low / 15).astype(ml_dtypes.bfloat16)  # high - low might overflow
        wide = np.where(scale > 0, scale, 1).astype("float32")
        zero_point = np.clip(np.rint(-low / wide), 0, 15)
        codes = groups / wide[:, None]
        np.rint(codes, out=codes)
        codes += zero_point[:, None]
        np.clip(codes, 0, 15, out=codes)
        return {"codes": pack(codes.astype("uint8")), "scale": scale, "zero_point": zero_point.astype("uint8")}

    def dequantize(self, parts, inputs, outputs):
        codes = ops.cast(unpack(parts["codes"]), "float32") - ops.cast(parts["zero_point"], "float32")[:, None]
        return ungrouped(codes * ops.cast(parts["scale"], "float32")[:, None], inputs)
