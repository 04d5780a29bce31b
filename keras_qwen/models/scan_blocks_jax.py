"""All decoder blocks as one `jax.lax.scan`: one block is traced and compiled, however many there are."""

import jax
import jax.numpy as jnp
import keras


def scan_blocks(blocks, hidden, *, training, **given):
    """`hidden` after all blocks, each called with the arguments `given`.

    The blocks' weights are stacked for the scan, which is a copy of them, in the compute dtype.
    """
    first = blocks[0]
    stacked = [jnp.stack(values) for values in zip(*([v.value for v in b.variables] for b in blocks), strict=True)]

    def call_block(hidden, values):
        with keras.StatelessScope(state_mapping=list(zip(first.variables, values, strict=True))):
            return first(hidden, training=training, **given), None

    return jax.lax.scan(call_block, hidden, stacked)[0]


def check_alike(blocks):
    """Raises ValueError unless one block, with the others' weights, computes what each of them does."""
    for name, values in {
        "remat": [block.remat for block in blocks],
        "sliding window": [block.config.window(block.layer_index) for block in blocks],
        "variables": [[(v.name, tuple(v.shape), v.dtype, v.trainable) for v in block.variables] for block in blocks],
    }.items():
        odd = next((i for i, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            raise ValueError(
                f"scan_blocks needs blocks that are alike, but layers_{odd} differs from layers_0 in its {name}; "
                "set scan_blocks=False."
            )
    if any("seed" in v.path for v in blocks[0].non_trainable_variables):
        raise ValueError(
            "scan_blocks and dropout exclude each other, as every block would drop the same: turn one off."
        )
