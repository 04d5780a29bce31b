"""The settings of `keras-qwen finetune`, under the names of the Python arguments they become."""

import dataclasses

from keras_qwen.cli.settings import setting

METHODS = ("sft", "pretrain", "dpo")
SCHEDULES = ("cosine", "wsd", "constant")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Arguments of `QwenCausalLM.enable_lora`."""

    rank: int = setting(16, "Size of the change of each projection.")
    alpha: float | None = setting(None, "Strength; default: rank.")
    targets: list | str | None = setting(None, "Names of projections, or a regular expression; default: all of them.")
    dropout: float = setting(0.0, "Rate at which the adapter's inputs are dropped.")
    use_dora: bool = setting(False, "Train a magnitude for each column, too (DoRA).")
    use_rslora: bool = setting(False, "Scale by alpha / sqrt(rank) (rsLoRA).")
    rank_pattern: dict | None = setting(None, "{pattern: rank} for modules that differ.")
    alpha_pattern: dict | None = setting(None, "{pattern: alpha} for modules that differ.")
    modules_to_save: list | str | None = setting(None, "embed_tokens or lm_head: copies that are trained whole.")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Arguments of `training.AdamW`."""

    learning_rate: float | None = setting(None, "The peak; default: 2e-4 with LoRA, 1e-5 without, 5e-6 for dpo.")
    weight_decay: float = setting(0.01, "Not applied to norms and biases.")
    global_clipnorm: float | None = setting(1.0, "The gradient's norm at most; none to leave it as it is.")
    beta_1: float = setting(0.9, "Decay of the mean of gradients.")
    beta_2: float = setting(0.999, "Decay of the mean of squared gradients.")
    epsilon: float = setting(1e-7, "Added to the root of the squares' mean.")
    moments: str | None = setting(None, "How the two means are kept: bfloat16 or int8 need less memory.")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the learning rate goes up and down."""

    name: str = setting("cosine", "cosine, wsd (warm-up, stable, decay) or constant, each after a warm-up.")
    warmup_steps: int | None = setting(None, "Default: 3 % of all steps.")
    decay_steps: int | None = setting(None, "Of wsd: steps at the end in which it falls; default: 20 % of all.")
    final: float | None = setting(None, "Where cosine and wsd end, as a share of the peak; default: 0.1.")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Arguments of `callbacks.Checkpoint`, which keeps the states a killed run goes on from."""

    folder: str | None = setting(None, "Default: `checkpoint` in the output folder.")
    every: int | str = setting("epoch", "Steps after which to save, or `epoch`.")
    keep: int = setting(2, "How many states to keep.")
    best: str | None = setting(None, "Keep the best model by this metric, such as val_loss, too.")


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """Which monitors of `keras_qwen.callbacks` run."""

    learning_rate: bool = setting(True, "LearningRate: the rate of each step.")
    throughput: bool = setting(True, "Throughput: tokens a second.")
    device_memory: bool = setting(True, "DeviceMemory: bytes in use, peak and limit.")
    gradient_norm: bool = setting(False, "GradientNorm: of each block.")
    activation_statistics: bool = setting(False, "ActivationStatistics: size of activations, and where NaN began.")
    samples: list | None = setting(None, "Prompts that Samples answers after each epoch.")


@dataclasses.dataclass(frozen=True)
class Settings:
    """All of it; sections are dicts in the YAML file, and dotted names as flags."""

    model: str = setting(dataclasses.MISSING, "Folder or Hub id of the model to start from.")
    data: list | str = setting(dataclasses.MISSING, "File, pattern or list of them: .jsonl, .json, .parquet, .txt.")
    output: str = setting(dataclasses.MISSING, "Folder for model or adapter, report, history and checkpoints.")
    method: str = setting("sft", "sft (answers of chats), pretrain (raw text) or dpo (pairs of answers).")
    validation_data: list | str | None = setting(None, "As data, evaluated after each epoch.")
    dtype: str | None = setting(None, "dtype policy, such as mixed_bfloat16; default: float32.")
    remat: int | str | None = setting(None, "What the backward pass recomputes: block, attention, mlp, or every n-th.")
    quantization: str | None = setting(None, "Of the frozen base under LoRA: int8, int4 or nf4.")
    sequence_length: int = setting(1024, "Positions in a row.")
    batch_size: int = setting(8, "Rows of a step (pairs for dpo).")
    micro_batch_size: int | None = setting(None, "Rows that are computed at once; memory follows it, results do not.")
    packing: str | None = setting("auto", "best_fit (but for dpo), first_fit, or none: documents share rows.")
    too_long: str | None = setting(None, "Of documents longer than a row: raise, split (pretrain's default) or drop.")
    on_error: str = setting("raise", "Of records that cannot be used: raise, or skip, which counts them.")
    workers: int = setting(0, "Processes that encode the data; 0 for none besides this.")
    epochs: int = setting(1, "Passes over the data.")
    seed: int = setting(0, "Of the order, of dropout and of new weights.")
    beta: float | None = setting(None, "Of dpo: how strongly the model is held to where it began; default: 0.1.")
    lora: Lora | None = setting(None, "Train an adapter; without it, the whole model is trained.")
    optimizer: Optimizer = setting(Optimizer, "")
    schedule: Schedule = setting(Schedule, "")
    checkpoint: Checkpoint = setting(Checkpoint, "")
    callbacks: Callbacks = setting(Callbacks, "")

    def __post_init__(self):
        for name, value, known in (("method", self.method, METHODS), ("schedule.name", self.schedule.name, SCHEDULES)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}.")
        dpo, schedule = self.method == "dpo", self.schedule
        for wrong, message in (
            (self.quantization and self.lora is None, "quantization freezes the base: add a lora section to train."),
            (dpo and self.lora is None, "dpo compares with the model without its adapter: add a lora section."),
            (dpo and self.packing not in ("auto", None), "dpo does not pack pairs: leave out packing."),
            (not dpo and self.beta is not None, "beta is a setting of dpo: leave it out."),
            (schedule.name != "wsd" and schedule.decay_steps is not None, "schedule.decay_steps is one of wsd."),
            (schedule.name == "constant" and schedule.final is not None, "schedule.final: constant ends at the peak."),
        ):
            if wrong:
                raise ValueError(message)

    def resolved(self):
        """With the defaults that depend on other settings filled in."""
        dpo, rate = self.method == "dpo", self.optimizer.learning_rate
        if rate is None:
            rate = 5e-6 if dpo else 1e-5 if self.lora is None else 2e-4
        final = self.schedule.final
        if final is None and self.schedule.name != "constant":
            final = 0.1
        return dataclasses.replace(
            self,
            packing=(None if dpo else "best_fit") if self.packing == "auto" else self.packing,
            too_long=self.too_long or ("split" if self.method == "pretrain" else "raise"),
            beta=0.1 if dpo and self.beta is None else self.beta,
            optimizer=dataclasses.replace(self.optimizer, learning_rate=rate),
            schedule=dataclasses.replace(self.schedule, final=final),
        )
