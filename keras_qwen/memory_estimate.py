"""What each device holds during a training step, from config and parameter table alone: no weights, no compiler.

A step's memory is highest at one of four moments, of which the estimate takes the largest:

- `loss`: all blocks have kept what their backward passes need, and the head works on a chunk of tokens;
- `last block`: the same, while the last block is differentiated (with remat, after it was computed again);
- `first block`: little is kept any more, but the gradients of all other blocks are there;
- `update`: all gradients, and what the embedding's own takes.

Sizes are those of XLA's buffers on an accelerator; the planner compares them with its compiler's own account.
"""

import dataclasses
import math

from keras_qwen.config import QwenConfig
from keras_qwen.ops.linear_cross_entropy import DEFAULT_MEMORY_BUDGET
from keras_qwen.ops.quantization import KINDS
from keras_qwen.parameters import (
    adapter_table,
    parameter_table,
    projections,
    quantized_table,
)
from keras_qwen.partitioning import batch_shards, checked_mesh, partition, update_partition

CATEGORIES = (
    "weights",
    "optimizer",
    "gradients",
    "saved_activations",
    "working_set",
    "logits_chunk",
    "collectives",
)
OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "lion": 4, "sgd": 0, "adamw-bfloat16": 4, "adamw-int8": 2 + 8 / 128}
"""Bytes of state for each trained float32 weight; the last two are `keras_qwen.training.AdamW(moments=...)`."""
DTYPE_BYTES = {
    "float32": (4, 4),
    "mixed_bfloat16": (4, 2),
    "mixed_float16": (4, 2),
    "bfloat16": (2, 2),
    "float16": (2, 2),
}
USABLE = 0.94
"""The share of a device's memory to count on: the rest is the driver's, the libraries', and gaps."""


def usable(memory) -> int:
    """Bytes of a device's memory that a plan counts on."""
    return int(USABLE * memory)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a training step's memory depends on.

    Attributes:
        config: of the model.
        mesh: `{axis: size}`; `{}` for one device.
        batch_size: rows of a step, on all devices together.
        sequence_length: tokens of a row.
        dtype: dtype policy, e.g. `"mixed_bfloat16"`.
        remat: as of `QwenCausalLM`.
        optimizer: one of `OPTIMIZER_BYTES`.
        lora_rank: rank of an adapter on all projections, the base frozen; None for full training.
        quantization: None, or a kind of quantised base; then there has to be an adapter.
        micro_batch_size: rows that are computed at once, on all devices together; None for whole batches.
        sequence_parallel, shard_optimizer: as of `keras_qwen.distribution.model_parallel`.

    Raises:
        ValueError: naming the setting, for values that are unknown or not positive, or do not go together.
    """

    config: QwenConfig
    mesh: dict[str, int]
    batch_size: int
    sequence_length: int
    dtype: str = "mixed_bfloat16"
    remat: str | int | None = "block"
    optimizer: str = "adamw"
    lora_rank: int | None = None
    quantization: str | None = None
    micro_batch_size: int | None = None
    sequence_parallel: bool = False
    shard_optimizer: bool = False

    def __post_init__(self):
        object.__setattr__(self, "mesh", checked_mesh(self.mesh) if self.mesh else {})
        for name in ("batch_size", "sequence_length", "lora_rank", "micro_batch_size"):
            value = getattr(self, name)
            if value is None and name in ("lora_rank", "micro_batch_size"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        for name, known in (
            ("dtype", DTYPE_BYTES),
            ("optimizer", OPTIMIZER_BYTES),
            ("quantization", {None: 0, **KINDS}),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"Unknown {name} {getattr(self, name)!r}; known are {', '.join(map(str, known))}.")
        if self.remat not in (None, "block", "attention", "mlp") and (
            isinstance(self.remat, bool) or not isinstance(self.remat, int) or self.remat < 1
        ):
            raise ValueError(f"Unknown remat {self.remat!r}; known are None, 'block', 'attention', 'mlp', and n.")
        if self.quantization is not None and self.lora_rank is None:
            raise ValueError("A quantised base is frozen: give a lora_rank.")
        shards, rows = batch_shards(self.mesh), self.micro_batch_size or self.batch_size
        if rows % shards or self.batch_size % rows:
            raise ValueError(
                f"{self.batch_size} rows, {rows} at once, do not fall into equal parts for the {shards} devices that "
                f"the mesh {self.mesh} splits a batch over."
            )

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def device_rows(self) -> int:
        """Rows that a device computes at once; of a mesh that splits heads, the devices of one batch part together."""
        return (self.micro_batch_size or self.batch_size) // batch_shards(self.mesh)


def _moments(setup, pressed):
    """`(moments, always)`: bytes by category at each moment a step's memory may be highest, and at all of them."""
    held = _held(setup)
    kept = _Activations(setup, held.copies)
    always = {"weights": held.weights, "optimizer": held.optimizer}
    # The head's gradient is summed in the loop over chunks and handed on as another array; of a mesh's parts, reduced
    # into a third. The same goes for that of embeddings of their own, to which rows are added one by one.
    arrays = 3 if batch_shards(setup.mesh) > 1 else 2
    summed = arrays * held.head_gradient
    # On one device an update follows its gradient at once. Between devices, gradients that are reduced wait for each
    # other, so as to hide the traffic, as long as there is room.
    waiting = held.gradients if setup.devices > 1 and not pressed else held.head_gradient
    # A micro-batch's own gradients are all there before they are added up, with the arrays the head's went through.
    added_up, own = (held.gradients, held.gradients + summed) if setup.micro_batch_size else (0, 0)
    moments = {
        "loss": dict(
            gradients=summed, saved_activations=kept.saved, logits_chunk=kept.head, working_set=2 * kept.whole
        ),
        "last block": dict(
            gradients=held.head_gradient,
            saved_activations=kept.saved,
            working_set=kept.block_working + held.expanded,
            collectives=held.gathered_block,
        ),
        "first block": dict(
            gradients=max(waiting - held.embedding_gradient - held.block_gradient, 0),
            saved_activations=kept.saved_by_one,
            working_set=kept.block_working + held.expanded,
            collectives=held.gathered_block,
        ),
        "update": dict(gradients=max(waiting, own), working_set=arrays * held.embedding_working + kept.residual),
    }
    for moment in moments.values():
        moment["gradients"] += added_up
    return moments, always


def estimate(setup: Setup, room: int | None = None) -> dict[str, int]:
    """Bytes on each device at the moment that needs most, by category.

    Args:
        setup: what is trained, and how.
        room: bytes that there are for it; a compiler that does not get along with them spends less on speed.

    Returns:
        `{category: bytes}` for `CATEGORIES`; their sum is the estimate.

    Example:
        >>> sum(estimate(Setup(config, {"fsdp": 2, "model": 8}, batch_size=8, sequence_length=4096)).values()) / 1e9
    """
    for pressed in (False, True):
        moments, always = _moments(setup, pressed)
        highest = max(moments.values(), key=lambda moment: sum(moment.values()))
        found = {name: int((always | highest).get(name, 0)) for name in CATEGORIES}
        if room is None or sum(found.values()) <= room:
            break
    return found


@dataclasses.dataclass
class _Held:
    """Bytes on a device that do not depend on the batch."""

    weights: float = 0
    optimizer: float = 0
    gradients: float = 0
    head_gradient: float = 0
    embedding_gradient: float = 0
    embedding_working: float = 0
    gathered_block: float = 0
    expanded: float = 0
    copies: dict = dataclasses.field(default_factory=lambda: {"attention": 0.0, "feed_forward": 0.0})
    block_gradient: float = 0


def _held(setup):
    config, mesh = setup.config, setup.mesh
    wide, narrow = DTYPE_BYTES[setup.dtype]
    table = parameter_table(config)
    adapter = ()
    if setup.lora_rank is not None:
        adapter = adapter_table(table, name="default", ranks=dict.fromkeys(projections(table), setup.lora_rank))
    held, shards = _Held(), mesh.get("fsdp", 1)
    base = [(row, count, setup.lora_rank is None) for row, count in counted(quantized_table(table, setup.quantization))]
    for row, count, trained in base + [(row, count, True) for row, count in counted(adapter)]:
        is_adapter = setup.lora_rank is not None and trained
        split = partition(row, config, mesh)
        size = math.prod(split.local_shape(row.shape, mesh))
        gathered = size * shards if any("fsdp" in axes for axes in split.dimensions) else size
        if row.quantized is not None:
            held.weights += count * size * row.quantized.parts[row.part].nbytes / row.size
        else:
            held.weights += count * size * (4 if is_adapter else 2 if setup.quantization else wide)
        in_block = count > 1 or "layers_0/" in row.path
        if in_block and row.quantized is not None and row.part == "codes":
            # Codes as integers, levels, their product. Compiled steps take 9 to 16 bytes an element, by the schedule.
            held.expanded += 3 * 4 * size * math.prod((row.quantized.inputs, row.quantized.outputs)) / row.size
        if in_block and gathered > size:
            held.gathered_block += gathered * narrow
        if in_block and not is_adapter and narrow < wide and row.quantized is None:
            held.copies["feed_forward" if "/mlp/" in row.path else "attention"] += size * narrow
        if not trained:
            continue
        update = update_partition(split, row.shape, mesh, shard_optimizer=setup.shard_optimizer)
        update_size = math.prod(update.local_shape(row.shape, mesh))
        # Between devices, gradients of matrices are reduced in the compute dtype, and wait in it.
        of_matrix = setup.devices > 1 and len(row.shape) == 2 and "vocab" not in row.axes
        added_up = setup.micro_batch_size is not None
        gradient = update_size * (4 if is_adapter or added_up else narrow if of_matrix else wide)
        plain = setup.optimizer in ("adamw", "adam", "lion", "sgd")  # whose state has the weights' dtype
        state = OPTIMIZER_BYTES[setup.optimizer] * (wide / 4 if plain and not is_adapter else 1)
        held.optimizer += count * update_size * state
        held.gradients += count * gradient
        held.block_gradient += gradient if in_block else 0
        if "vocab" in row.axes:
            if row.path.startswith("embed") and not config.tie_word_embeddings:
                held.embedding_gradient = gradient
                held.embedding_working = gathered * 4
            if row.path.startswith("lm_head") or config.tie_word_embeddings:
                held.head_gradient = gathered * 4
    return held


def counted(table):
    """`(row, how often)` for each kind of row: those of the first block stand for those of all."""
    layers = 1 + max((int(row.path.split("/")[0][7:]) for row in table if row.path.startswith("layers_")), default=0)
    for row in table:
        if not row.path.startswith("layers_"):
            yield row, 1
        elif row.path.startswith("layers_0/"):
            yield row, layers


class _Activations:
    """Bytes on a device that grow with its tokens."""

    def __init__(self, setup, copies):
        config, mesh = setup.config, setup.mesh
        self.setup, self.config, self.copies = setup, config, copies
        model = mesh.get("model", 1)
        self.narrow = DTYPE_BYTES[setup.dtype][1]
        self.tokens = setup.device_rows * setup.sequence_length
        split_length = setup.sequence_parallel and setup.sequence_length % model == 0
        self.residual_tokens = self.tokens // model if split_length else self.tokens
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.heads = heads // model if heads % model == 0 else heads
        self.kv_heads = kv_heads // model if kv_heads % model == 0 else kv_heads
        self.mlp = config.intermediate_size // (model if config.intermediate_size % model == 0 else 1)
        self.vocab = config.vocab_size // (model if config.vocab_size % model == 0 else 1)

    @property
    def residual(self):
        """The hidden states between two blocks."""
        return self.residual_tokens * self.config.hidden_size * self.narrow

    @property
    def whole(self):
        """The hidden states of all of a device's tokens."""
        return self.tokens * self.config.hidden_size * self.narrow

    @property
    def attention(self):
        """What attention's backward pass needs: its input, query, key, value, context and each row's log-sum."""
        config, heads = self.config, (2 * self.heads + 2 * self.kv_heads) * self.config.head_dim
        heads += (self.heads + self.kv_heads) * config.head_dim if config.qk_norm else 0
        return self.normalized + self.tokens * (heads * self.narrow + self.heads * 4)

    @property
    def feed_forward(self):
        """What the feed-forward network's backward pass needs: its input, both halves of the gate, their product."""
        return self.normalized + 3 * self.tokens * self.mlp * self.narrow

    @property
    def normalized(self):
        """A norm's output: computed again in passing, unless it is gathered from the devices that split the length."""
        return self.whole if self.residual_tokens < self.tokens else 0

    @property
    def saved(self):
        """All that the forward pass keeps."""
        return sum(self._saved_of(policy) for policy in self._policies()) + self.residual

    @property
    def saved_by_one(self):
        """What is kept when only the first block is still to be differentiated."""
        return self._saved_of(self._policies()[0])

    def _policies(self):
        layers, remat = self.config.num_hidden_layers, self.setup.remat
        if isinstance(remat, int):
            return ["block" if i % remat == 0 else None for i in range(layers)]
        return [remat] * layers

    def _saved_of(self, policy):
        middle = self.residual  # between attention and feed-forward network
        attention = self.attention + self.copies["attention"]
        feed_forward = self.feed_forward + self.copies["feed_forward"]
        return (
            self.residual
            + {
                "block": 0,
                "attention": middle + feed_forward,
                "mlp": middle + attention,
                None: middle + attention + feed_forward,
            }[policy]
        )

    @property
    def block_working(self):
        """What one block's backward pass takes beyond what is kept: what remat computes again, and slopes."""
        again = {
            "block": self.attention + self.feed_forward + self.residual,
            "attention": self.attention,
            "mlp": self.feed_forward,
            None: 0,
        }[self._policies()[0]]
        return again + 2 * self.tokens * self.mlp * self.narrow + self.whole

    @property
    def head(self):
        """The logits of a chunk of tokens, as float32 and as slopes; the head in the compute dtype."""
        chunk = min(self.tokens, max(1, DEFAULT_MEMORY_BUDGET // (4 * self.config.vocab_size)))
        cast = DTYPE_BYTES[self.setup.dtype][0] > self.narrow and not self.setup.quantization
        weights = self.vocab * self.config.hidden_size * self.narrow if cast or self.setup.devices > 1 else 0
        return chunk * self.vocab * (4 + self.narrow) + weights
