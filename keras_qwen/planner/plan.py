"""plan: what each device will hold during training, and whether it fits."""

import dataclasses

from keras_qwen.communication_estimate import communication
from keras_qwen.compute_estimate import flops_per_token
from keras_qwen.config import QwenConfig
from keras_qwen.hardware import accelerator, memory_bytes
from keras_qwen.memory_estimate import Setup, estimate, usable
from keras_qwen.parameters import adapter_table, parameter_table, projections


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What `plan` returns; prints as a table.

    Attributes:
        setup: what was asked for, a `keras_qwen.memory_estimate.Setup`.
        categories: `{category: bytes}` on each device at the moment that needs most.
        device_memory: bytes of a device; None where it was not said.
        device: its name, if it was said by name.
    """

    setup: Setup
    categories: dict[str, int]
    device_memory: int | None = None
    device: str | None = None

    @classmethod
    def of(cls, setup, device_memory=None, device=None) -> "MemoryPlan":
        """The plan of a setup; `device_memory` in bytes."""
        room = None if device_memory is None else usable(device_memory)
        return cls(setup, estimate(setup, room), device_memory, device)

    @property
    def total_bytes(self) -> int:
        """Bytes on each device, all categories together."""
        return sum(self.categories.values())

    @property
    def usable_bytes(self) -> int | None:
        """What a plan counts on: 94 % of the device's memory."""
        return None if self.device_memory is None else usable(self.device_memory)

    @property
    def fits(self) -> bool | None:
        """Whether it fits into `usable_bytes`; None where the device's memory was not said."""
        return None if self.device_memory is None else self.total_bytes <= self.usable_bytes

    @property
    def flops_per_step(self) -> float:
        """Operations of a step on all devices together, what remat does again not counted; see `flops_per_token`."""
        setup = self.setup
        adapter = 0 if setup.lora_rank is None else _adapter_weights(setup)
        per_token = flops_per_token(
            setup.config,
            setup.sequence_length,
            trained_weights=None if setup.lora_rank is None else 0,
            adapter_weights=adapter,
        )
        return per_token * setup.batch_size * setup.sequence_length

    @property
    def communication(self) -> dict[str, float]:
        """`{mesh axis: bytes}` that each device receives in a step, counted on paper."""
        return communication(self.setup)

    @property
    def recomputing(self) -> float:
        """By what remat multiplies the operations.

        A forward pass is a third of full training's operations, half of an adapter's; attention is about a fifth of a
        block's, the feed-forward network the rest.
        """
        setup = self.setup
        again = {None: 0, "block": 1, "attention": 0.2, "mlp": 0.8}
        share = 1 / setup.remat if isinstance(setup.remat, int) else again[setup.remat]
        return 1 + share * (1 / 3 if setup.lora_rank is None else 1 / 2)

    @property
    def floor_seconds(self) -> float | None:
        """The least a step can take: arithmetic at the device's peak, recomputing counted, and what is sent.

        None where the device was not named.
        """
        known = self.device and accelerator(self.device)
        if not known:
            return None
        compute = self.flops_per_step * self.recomputing / (known.peak_flops * self.setup.devices)
        return compute + sum(self.communication.values()) / known.link

    def kv_cache_bytes(self, batch_size, length) -> int:
        """Bytes on each device of the keys and values of `generate`.

        Args:
            batch_size: prompts at once.
            length: tokens of prompt and continuation together.
        """
        config, mesh = self.setup.config, self.setup.mesh
        model = mesh.get("model", 1)
        heads = config.num_key_value_heads // (model if config.num_key_value_heads % model == 0 else 1)
        narrow = 4 if self.setup.dtype == "float32" else 2
        return 2 * config.num_hidden_layers * batch_size * length * heads * config.head_dim * narrow

    def replaced(self, **changes) -> "MemoryPlan":
        """The plan with other settings, e.g. `plan.replaced(remat="block")`."""
        return MemoryPlan.of(dataclasses.replace(self.setup, **changes), self.device_memory, self.device)

    def largest(self, what):
        """The largest value of a setting with which it still fits, all others as they are.

        Args:
            what: `"batch_size"` (in steps of what the mesh splits), `"sequence_length"` (in steps of 128), or
                `"model"`: the largest published Qwen2.5 model, by name.

        Returns:
            An integer, or a name; None if none fits.

        Raises:
            ValueError: for an unknown setting, or without `device_memory`.

        Example:
            >>> kq.plan(config, mesh={}, batch_size=1, sequence_length=512, device_memory="24GB").largest("batch_size")
        """
        from keras_qwen.planner.search import largest

        return largest(self, what)

    def compile(self, topology="cpu"):
        """The compiler's own account of the real training step, for devices that need not exist.

        In a process of its own, on JAX, the model is made without memory, its step lowered for the devices and
        compiled. It takes minutes for large models. A compiler uses the room there is: if the plan has a
        `device_memory` and the step takes more on the topology's devices, it is compiled again for devices that have no
        more than `usable_bytes`, and the figures are of that unless it does not fit.

        Args:
            topology: `"cpu"` for simulated CPU devices, whose compiler ignores remat; or what libtpu calls an
                accelerator topology, e.g. `"v5p:2x2x4"`; needs `pip install "keras-qwen[planner]"`, no TPU.

        Returns:
            A `keras_qwen.planner.compiling.CompiledStep`.

        Raises:
            ValueError: for a topology that is not known, or has too few devices.
            ImportError: if jax or libtpu is missing, naming the extra.
            RuntimeError: with the compiler's words, among them how much it takes, for what the topology's devices do
                not hold.
        """
        from keras_qwen.planner.compiling import compile_plan

        return compile_plan(self, topology)

    def plot(self, path=None):
        """A stacked bar of the categories, beside the device's memory; a matplotlib figure.

        Args:
            path: where to write a PNG, too.
        """
        from keras_qwen.planner.drawing import draw

        return draw([self], path)

    def __str__(self):
        from keras_qwen.planner.tables import plan_table

        return plan_table(self)


def plan(
    config,
    *,
    mesh=None,
    batch_size=1,
    sequence_length=2048,
    dtype="mixed_bfloat16",
    remat="block",
    optimizer="adamw",
    lora_rank=None,
    quantization=None,
    device_memory=None,
    micro_batch_size=None,
    sequence_parallel=False,
    shard_optimizer=False,
) -> MemoryPlan:
    """Says what each device will hold in a training step, from config and mesh alone: nothing is loaded or allocated.

    Args:
        config: a `QwenConfig`.
        mesh: `{axis: size}` of `data`, `fsdp`, `model`; None for one device.
        batch_size: rows of a step, on all devices together.
        sequence_length: tokens of a row.
        dtype: dtype policy: `"float32"`, `"mixed_bfloat16"`, `"bfloat16"`, ...
        remat: as of `QwenCausalLM`.
        optimizer: `"adamw"`, `"adam"`, `"lion"`, `"sgd"`, or `"adamw-bfloat16"`, `"adamw-int8"` for
            `keras_qwen.training.AdamW(moments=...)`.
        lora_rank: rank of an adapter on all projections; None for full training.
        quantization: None, `"int8"`, `"int4"` or `"nf4"`, with a `lora_rank`.
        device_memory: of each device, `"24GB"`, `"80 GiB"`, a number of bytes, or a device by name: `"H100"`,
            `"A100-80"`, `"RTX 4090"`. On a mesh, a compiler that has no room for gradients to wait
            updates each weight at once, which the plan then counts on.
        micro_batch_size, sequence_parallel, shard_optimizer: as of `compile` and `model_parallel`.

    Returns:
        A `MemoryPlan`.

    Raises:
        ValueError: naming a setting that is unknown, not positive, or does not go with the others.

    Example:
        >>> config = kq.QwenConfig.from_pretrained("Qwen/Qwen2.5-7B-Instruct")
        >>> plan = kq.plan(config, mesh={"fsdp": 4}, batch_size=8, sequence_length=4096, device_memory="H100")
        >>> print(plan)
        >>> plan.fits, plan.largest("batch_size")
    """
    if not isinstance(config, QwenConfig):
        raise ValueError(f"plan takes a QwenConfig, not {type(config).__name__}: QwenConfig.from_pretrained(...).")
    setup = Setup(
        config=config,
        mesh=mesh or {},
        batch_size=batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        remat=remat,
        optimizer=optimizer,
        lora_rank=lora_rank,
        quantization=quantization,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        shard_optimizer=shard_optimizer,
    )
    memory = None if device_memory is None else memory_bytes(device_memory)
    named = isinstance(device_memory, str) and accelerator(device_memory) is not None
    return MemoryPlan.of(setup, memory, device_memory if named else None)


def _adapter_weights(setup):
    table = parameter_table(setup.config)
    ranks = dict.fromkeys(projections(table), setup.lora_rank)
    return sum(row.size for row in adapter_table(table, name="default", ranks=ranks))
