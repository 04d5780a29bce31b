"""The demo itself, in the order a fine-tuner works: data, model, loss before, `fit`, loss after, save, load again."""

import dataclasses
import gc
import hashlib
import random
from pathlib import Path

import keras
import numpy as np

import keras_qwen as kq
from keras_qwen.demo.losses import StepLosses, plot_losses
from keras_qwen.demo.rows import Rows

SHIPPED_CHATS = Path(__file__).with_name("chats.jsonl")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train, and how large to make the model if none is given.

    Args:
        epochs: passes over the training chats.
        batch_tokens: about how many tokens a training step sees, padding included.
        learning_rate: the peak, after the warm-up.
        max_length: longer chats are left out.
        vocab_size: of the small model at most, which the following describe, too.
        hidden_size: width of the residual stream, a multiple of 64.
        num_hidden_layers: number of blocks.
    """

    epochs: int
    batch_tokens: int
    learning_rate: float
    max_length: int = 512
    vocab_size: int = 2048
    hidden_size: int = 192
    num_hidden_layers: int = 4


FROM_SCRATCH = Settings(epochs=14, batch_tokens=512, learning_rate=3e-3)
PRETRAINED = Settings(epochs=3, batch_tokens=256, learning_rate=1e-5)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run has shown: losses per answer token, replies to one held-out chat, and where the files are."""

    step_losses: list[float]
    epoch_losses: list[float]
    held_out_losses: list[float]
    replies: tuple[str, str]
    reload_is_equal: bool
    model_folder: Path
    figure: Path


def run(source=None, data=None, output="demo_output", settings=None):
    """Fine-tune a model on chats, and show what that did.

    Args:
        source: checkpoint folder or Hub id. By default a small model with random weights, whose tokenizer is trained
            on the chats.
        data: .jsonl file of chats; by default those that ship with the package.
        output: folder for the results, made if need be.
        settings: `Settings`; by default what suits a small model, or a pretrained one.

    Returns:
        A `Report`.

    Raises:
        ValueError: the chats or the checkpoint cannot be used; the message says where and why.
        OSError: a file cannot be read or written.

    Example:
        >>> report = run("Qwen/Qwen2.5-0.5B-Instruct", "chats.jsonl")
        >>> report.held_out_losses[0] > report.held_out_losses[-1]
        True
    """
    data, output = Path(data or SHIPPED_CHATS), Path(output)
    settings = settings or (PRETRAINED if source else FROM_SCRATCH)
    output.mkdir(parents=True, exist_ok=True)
    random.seed(0)  # Keras draws the seeds of its initialisers from here

    if source:
        tokenizer = kq.QwenTokenizer.from_pretrained(source)
        model = kq.QwenCausalLM.from_pretrained(source, remat="block")
    else:
        tokenizer, model = small_model(data, settings)
    rows = Rows(data, tokenizer, settings.batch_tokens, settings.max_length)
    name = source or "a small Qwen with random weights"
    print(f"backend: Keras {keras.__version__} on {keras.backend.backend()}")
    print(f"model:   {name}, {model.count_params() / 1e6:,.1f} M parameters")
    print(f"data:    {data}, {len(rows.train)} chats to train on, {len(rows.held_out)} held out")
    if rows.left_out:
        print(f"         {rows.left_out} chats of more than {settings.max_length} tokens are left out")
    print(f"steps:   {rows.steps_per_epoch} an epoch, {rows.batch_size} rows of {rows.length} tokens each\n")

    reply_before = reply(model, tokenizer, rows.question)
    step_losses, epoch_losses, held_out_losses = fine_tune(model, rows, settings)
    replies = reply_before, reply(model, tokenizer, rows.question)
    figure, folder = output / "loss.png", output / "model"
    plot_losses(figure, step_losses, held_out_losses, f"Training {name} on {len(rows.train)} chats")

    probe = {key: value[:1] for key, value in rows.validation()["x"].items()}
    trained = fingerprint(model, probe)
    # In the variables' dtype, which may be finer than the source's: the files then hold exactly what was trained.
    model.save_pretrained(folder, dtype=model.variable_dtype, tokenizer=tokenizer)
    del model
    gc.collect()  # a large model and its optimizer make room for the second one
    reload_is_equal = fingerprint(kq.QwenCausalLM.from_pretrained(folder), probe) == trained

    report = Report(step_losses, epoch_losses, held_out_losses, replies, reload_is_equal, folder, figure)
    print_report(report, rows.question, len(trained["tensors"]))
    return report


def small_model(data, settings):
    """A small Qwen3 with random weights, and a tokenizer trained on the chats of a file."""
    messages = [message for chat in kq.data.read_chats(data) for message in chat["messages"]]
    texts = [f"{message['role']}\n{message['content'] or ''}" for message in messages]
    tokenizer = kq.QwenTokenizer.train(texts, settings.vocab_size)
    config = kq.QwenConfig(
        model_type="qwen3",
        vocab_size=tokenizer.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.hidden_size * 3,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.hidden_size // 32,
        num_key_value_heads=settings.hidden_size // 64,
        head_dim=32,
        max_position_embeddings=settings.max_length,
        tie_word_embeddings=True,
        extra={"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
    )
    return tokenizer, kq.QwenCausalLM(config)


def fine_tune(model, rows, settings, optimizer=keras.optimizers.AdamW):
    """Train.

    Args:
        model, rows, settings: what, on what, and how.
        optimizer: called with the schedule, `weight_decay` and `global_clipnorm`.

    Returns:
        Three lists of losses: of every step, of every epoch, and on the held-out rows before training and after every
        epoch.
    """
    steps = rows.steps_per_epoch * settings.epochs
    warmup_steps = max(steps // 10, 1)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=settings.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=max(steps - warmup_steps, 1),
        alpha=0.1,
    )
    model.compile(optimizer=optimizer(schedule, weight_decay=0.01, global_clipnorm=1.0))
    training, validation = rows.training(settings.epochs), rows.validation()
    loss_before = model.evaluate(**validation, verbose=0, return_dict=True)["loss"]
    step_losses = StepLosses(training["sample_weight"].reshape(steps, -1).sum(axis=1))
    history = model.fit(
        **training,
        validation_data=(validation["x"], validation["y"], validation["sample_weight"]),
        validation_batch_size=validation["batch_size"],
        callbacks=[step_losses],
    )
    return step_losses.losses, history.history["loss"], [loss_before, *history.history["val_loss"]]


def reply(model, tokenizer, chat, max_new_tokens=48):
    """The model's most likely answer to a chat, as text."""
    prompt = tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), add_generation_prompt=True)
    stop = [tokenizer.eos_token_id]
    new_tokens = model.generate([prompt], max_new_tokens=max_new_tokens, temperature=0.0, stop=stop)
    return tokenizer.decode(new_tokens[0], skip_special_tokens=True)


def fingerprint(model, inputs):
    """Digests of every tensor and of the logits for the inputs: equal only if both models hold and compute the same."""

    def digest(value):
        return hashlib.sha256(np.ascontiguousarray(keras.ops.convert_to_numpy(value))).hexdigest()

    return {"tensors": [(v.path, digest(v)) for v in model.weights], "logits": digest(model(inputs))}


def print_report(report, chat, tensors):
    """Say what came of it, where the files are, and what to do next."""
    before, after = (text if len(text) <= 90 else text[:90] + "..." for text in report.replies)
    equal = "equal the trained model's" if report.reload_is_equal else "DIFFER from the trained model's"
    print(f"""
Loss per answer token
  held-out chats:     {report.held_out_losses[0]:.3f} before training, {report.held_out_losses[-1]:.3f} after it
  training chats:     {report.epoch_losses[0]:.3f} in the first epoch, {report.epoch_losses[-1]:.3f} in the last

A held-out question:  {chat["messages"][-1]["content"]!r}
  reply before:       {before!r}
  reply after:        {after!r}

Saved and loaded again: {tensors} tensors and the logits of a held-out chat {equal}.

Files
  {report.figure}: the loss, step by step
  {report.model_folder}: the model in Hugging Face form, in float32

Next
  make demo MODEL=Qwen/Qwen2.5-0.5B-Instruct DATA=chats.jsonl BACKEND=jax
    does the same with a real model and chats of your own, {{"messages": [...]}} on each line
  keras_qwen.QwenCausalLM.from_pretrained("{report.model_folder}").generate([{{"role": "user", "content": "Hello!"}}])
    talks to the model in Python; transformers, vLLM and llama.cpp's converter read the same folder
""")
