"""The training that `keras-qwen finetune` runs: model, data, `fit`, and what it leaves in the output folder."""

import csv
import dataclasses
import math
import random
import sys
from pathlib import Path

import yaml
from rich.table import Table
from rich.text import Text

from keras_qwen.cli.loading import load_package
from keras_qwen.cli.output import console, count, step
from keras_qwen.cli.settings import to_yaml

SETTINGS_NAME, HISTORY_NAME, REPORT_NAME = "settings.yaml", "history.csv", "report.png"
# What may differ when a run is taken up again, because no number depends on it.
_FREE = ("callbacks.", "checkpoint.every", "checkpoint.keep", "workers")


def run(settings, backend=None):
    """Trains, and writes the result; goes on where an earlier run with these settings was stopped.

    Args:
        settings: resolved `Settings`.
        backend: as of `load_package`.

    Raises:
        ValueError: for settings or data that cannot be used, and for an output folder of something else.
        OSError: if files cannot be read or written.
    """
    output = Path(settings.output).expanduser()
    check_output(output, settings)
    kq = load_package(backend)
    random.seed(settings.seed)  # Keras draws the seeds of dropout and of new weights from here
    model = kq.QwenCausalLM.from_pretrained(
        _absolute(settings.model), dtype=settings.dtype, remat=settings.remat, quantization=settings.quantization
    )
    if model.tokenizer is None:
        raise ValueError(f"{settings.model} has no tokenizer: copy tokenizer.json and tokenizer_config.json there.")
    with step("Encoding the data", spinner=False):
        data = dataset(kq, settings, settings.data, model.tokenizer)
        held_out = settings.validation_data and dataset(kq, settings, settings.validation_data, model.tokenizer)
    if settings.lora is not None:
        given = {name: value for name, value in dataclasses.asdict(settings.lora).items() if value is not None}
        model.enable_lora(**given)
    loss = kq.training.DPO(beta=settings.beta) if settings.method == "dpo" else None
    steps = len(data) * settings.epochs
    model.compile(
        kq.training.AdamW(schedule(kq, settings, steps), **_without(settings.optimizer, "learning_rate")),
        loss=loss,
        micro_batch_size=settings.micro_batch_size,
    )
    _print_plan(settings, model, data, steps)
    output.mkdir(parents=True, exist_ok=True)
    (output / SETTINGS_NAME).write_text(to_yaml(settings), encoding="utf-8")
    history = model.fit(
        data,
        validation_data=held_out,
        epochs=settings.epochs,
        verbose=1 if sys.stdout.isatty() else 2,
        callbacks=callbacks(kq, settings, output),
    )
    write_history(output / HISTORY_NAME, history)
    kq.callbacks.report(history, output / REPORT_NAME)
    kind = "model" if settings.lora is None else "adapter"
    with step(f"Writing {output / kind}"):
        (model.save_pretrained if settings.lora is None else model.save_adapter)(output / kind)
    _print_result(output, kind, history)


def check_output(output, settings):
    """Refuses a folder that is not of this run: of other settings, naming them, or of something else.

    Raises:
        ValueError: as said.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; output is a folder.")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / SETTINGS_NAME).is_file():
        raise ValueError(f"{output} holds files, but no {SETTINGS_NAME} of an earlier run: choose another folder.")
    before = _flat(yaml.safe_load((output / SETTINGS_NAME).read_text(encoding="utf-8")) or {})
    now = _flat(yaml.safe_load(to_yaml(settings)))
    different = [
        f"{name}: {before.get(name)} then, {value} now"
        for name, value in now.items()
        if before.get(name) != value and not name.startswith(_FREE)
    ]
    if different:
        lines = "\n  ".join(different)
        raise ValueError(
            f"{output} holds a run with other settings:\n  {lines}\n"
            f"Choose another output, set them back, or delete the folder to begin anew."
        )


def dataset(kq, settings, source, tokenizer):
    """The batches of a source, as the settings say; says on the console what is in it."""
    kind = kq.data.PreferenceDataset if settings.method == "dpo" else kq.data.ChatDataset
    packing = {} if settings.method == "dpo" else {"packing": settings.packing}
    return kind(
        source,
        tokenizer,
        sequence_length=settings.sequence_length,
        batch_size=settings.batch_size,
        too_long=settings.too_long,
        on_error=settings.on_error,
        workers=settings.workers,
        seed=settings.seed,
        shuffle=source == settings.data,
        **packing,
    )


def schedule(kq, settings, steps):
    """The learning rate of each step."""
    import keras

    chosen, peak = settings.schedule, settings.optimizer.learning_rate
    warmup = steps * 3 // 100 if chosen.warmup_steps is None else chosen.warmup_steps
    if chosen.name == "cosine":
        if warmup > steps:
            raise ValueError(f"schedule.warmup_steps is {warmup}; there are {steps} steps.")
        return keras.optimizers.schedules.CosineDecay(
            0.0 if warmup else peak,
            max(steps - warmup, 1),
            alpha=chosen.final,
            warmup_target=peak if warmup else None,
            warmup_steps=warmup,
        )
    if chosen.name == "constant":
        return kq.training.WarmupStableDecay(peak, steps, warmup)
    decay = steps // 5 if chosen.decay_steps is None else chosen.decay_steps
    return kq.training.WarmupStableDecay(peak, steps, warmup, decay, final=chosen.final)


def callbacks(kq, settings, output):
    """What watches the run: the monitors that are on, and the checkpoint."""
    on, kept = settings.callbacks, settings.checkpoint
    chosen = [
        kind()
        for name, kind in (
            ("learning_rate", kq.callbacks.LearningRate),
            ("throughput", kq.callbacks.Throughput),
            ("device_memory", kq.callbacks.DeviceMemory),
            ("gradient_norm", kq.callbacks.GradientNorm),
            ("activation_statistics", kq.callbacks.ActivationStatistics),
        )
        if getattr(on, name)
    ]
    if on.samples:
        chats = [[{"role": "user", "content": prompt}] for prompt in on.samples]
        chosen.append(kq.callbacks.Samples(chats, path=output / "samples.jsonl"))
    folder = output / "checkpoint" if kept.folder is None else Path(kept.folder).expanduser()
    return [*chosen, kq.callbacks.Checkpoint(folder, kept.every, keep=kept.keep, best=kept.best, seed=settings.seed)]


def write_history(path, history):
    """Writes a row for each epoch, as Keras's `CSVLogger` does; whole also after a run in several parts."""
    names = sorted(history.history)
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["epoch", *names])
        for number, epoch in enumerate(history.epoch):
            values = ([*history.history[name], *[""] * len(history.epoch)][number] for name in names)
            rows.writerow([epoch, *values])


def _flat(content, prefix=""):
    flat = {}
    for name, value in content.items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) and "pattern" not in name else {path: value}
    return flat


def _absolute(source):
    """A folder's whole path: the adapter's file names its base by it, and is read from elsewhere."""
    folder = Path(source).expanduser()
    return str(folder.absolute()) if folder.is_dir() else source


def _without(section, name):
    return {key: value for key, value in dataclasses.asdict(section).items() if key != name}


def _print_plan(settings, model, data, steps):
    trained = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    what = "the whole model" if settings.lora is None else f"an adapter of rank {settings.lora.rank}"
    table.add_row("model", Text(f"{settings.model}, {count(model.count_params())} parameters"))
    table.add_row("trained", Text(f"{what}, {count(trained)} parameters ({settings.method})"))
    table.add_row("data", Text(str(data.statistics)))
    table.add_row("steps", Text(f"{steps} ({settings.epochs} x {len(data)} batches)"))
    table.add_row("output", Text(settings.output))
    console.print(table)


def _print_result(output, kind, history):
    losses = history.history["loss"]
    first = f"{losses[0]:.3f} in the first epoch, " if len(losses) > 1 else ""
    console.print(Text(f"Loss {first}{losses[-1]:.3f} in the last epoch."))
    console.print(Text(f"In {output}: {kind}/, {REPORT_NAME}, {HISTORY_NAME}, {SETTINGS_NAME}"), soft_wrap=True)
    console.print(Text(f"Try it: keras-qwen chat {output / kind}", "green"), soft_wrap=True)
