"""ChatDataset without a model: what is in the batches, in which order, and where it is taken up again."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_qwen.data import ChatDataset, PreferenceDataset, encode_chat
from keras_qwen.tokenizer import QwenTokenizer

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {i} and {i}?"},
            {"role": "assistant", "content": f"It is {2 * i}. " * (1 + i % 4)},
        ]
    }
    for i in range(23)
]

QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.fixture(scope="module")
def tokenizer():
    return QwenTokenizer.train(["What is one and two? It is three. <think>"], 280)


@pytest.fixture
def make(tokenizer):
    def make(source=CHATS, **changed):
        return ChatDataset(source, tokenizer, **{"sequence_length": 100, "batch_size": 2, **changed})

    return make


def documents_in(batches):
    """Each document's input tokens and last label, and its trained labels, sorted."""
    found = []
    for inputs, labels, weights in batches:
        segments = inputs.get("segment_ids", inputs.get("padding_mask"))
        for row in range(len(labels)):
            for segment in range(1, segments[row].max() + 1):
                here = segments[row] == segment
                ids = [*inputs["token_ids"][row][here].tolist(), int(labels[row][here][-1])]
                found.append((ids, labels[row][here & (weights[row] > 0)].tolist()))
    return sorted(found)


def assert_equal(ones, others):
    ones, others = list(ones), list(others)
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        for a, b in zip((*one[0].values(), *one[1:]), (*other[0].values(), *other[1:]), strict=True):
            np.testing.assert_array_equal(a, b)


def differs(ones, others):
    return any(a[1].shape != b[1].shape or (a[1] != b[1]).any() for a, b in zip(ones, others, strict=False))


@pytest.mark.parametrize("packing", ["best_fit", "first_fit", None])
@pytest.mark.parametrize("window", [5, 16384])
def test_an_epoch_has_every_document_once(make, tokenizer, packing, window):
    dataset = make(packing=packing, window=window)
    expected = []
    for chat in CHATS:
        example = encode_chat(tokenizer, chat["messages"])
        ids, mask = example["token_ids"], example["assistant_mask"]
        expected.append((ids, [t for t, on in zip(ids, mask, strict=True) if on]))
    epochs = [list(dataset) for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(dataset)
        assert documents_in(epoch) == sorted(expected)
    assert differs(epochs[0], epochs[1]) and differs(epochs[1], epochs[2])
    assert_equal(epochs[0], make(packing=packing, window=window))
    assert differs(epochs[0], make(packing=packing, window=window, seed=1))


def test_without_shuffling_epochs_are_equal(make):
    dataset = make(shuffle=False, packing="first_fit")
    first = list(dataset)
    assert_equal(first, dataset)
    assert (
        first[0][0]["token_ids"][0][:30].tolist()
        == list(make(shuffle=False, packing=None, bucket_lengths=[100]))[0][0]["token_ids"][0][:30].tolist()
    )


def test_statistics(make, tokenizer):
    dataset = make()
    examples = [encode_chat(tokenizer, chat["messages"]) for chat in CHATS]
    statistics, batches = dataset.statistics, list(make())
    assert statistics.documents == statistics.examples == len(CHATS)
    assert statistics.tokens == sum(len(e["token_ids"]) - 1 for e in examples)
    assert statistics.tokens == sum(int((b[0]["segment_ids"] > 0).sum()) for b in batches)
    assert statistics.trained_tokens == sum(b[2].sum() for b in batches)
    assert statistics.fill_rate == statistics.tokens / sum(b[1].size for b in batches)
    assert f"{statistics.tokens:,} tokens" in str(statistics)
    assert statistics.fill_rate > 1.3 * make(packing=None, bucket_lengths=[100]).statistics.fill_rate


def test_buckets(make):
    dataset = make(packing=None, bucket_lengths=[40, 50, 100])
    lengths = [inputs["token_ids"].shape for inputs, _, _ in dataset]
    assert {length for _, length in lengths} == {40, 50, 100} and {rows for rows, _ in lengths} == {2}
    for inputs, _, _ in dataset:
        longest, length = inputs["padding_mask"].sum(axis=1).max(), inputs["padding_mask"].shape[1]
        assert longest <= length and (length == 40 or longest > {50: 40, 100: 50}[length])
    assert {b[1].shape[1] for b in make(packing=None)} <= {16, 32, 56, 100}


def test_the_last_batch_is_filled_up_with_padding(make):
    batches = list(make(CHATS[:1], batch_size=4))
    assert len(batches) == 1
    inputs, labels, weights = batches[0]
    assert labels.shape == (4, 100)
    assert inputs["segment_ids"][1:].max() == 0 and weights[1:].sum() == 0 and weights[0].sum() > 0
    rows = sum(int((b[0]["segment_ids"].max(axis=1) > 0).sum()) for b in make(batch_size=1))
    assert len(make(batch_size=3, drop_remainder=True)) == rows // 3
    padded = make(packing=None, batch_size=3, drop_remainder=True)
    assert len(padded) == padded.statistics.documents // 3
    assert all((inputs["padding_mask"].sum(1) > 0).all() for inputs, *_ in padded)  # no rows of padding
    with pytest.raises(ValueError, match="does not fill one batch of 64 rows"):
        make(batch_size=64, drop_remainder=True)


@pytest.mark.parametrize("packing", ["best_fit", None])
def test_hosts_share_the_batches_of_one(make, packing):
    whole = make(batch_size=6, packing=packing)
    shards = [make(batch_size=2, packing=packing, shard_index=i, shard_count=3) for i in range(3)]
    assert [len(shard) for shard in shards] == [len(whole)] * 3
    for batch, *parts in zip(whole, *shards, strict=True):
        for name in batch[0]:
            np.testing.assert_array_equal(batch[0][name], np.concatenate([part[0][name] for part in parts]))
        np.testing.assert_array_equal(batch[2], np.concatenate([part[2] for part in parts]))
    assert shards[1].fingerprint() == whole.fingerprint()


class TestPosition:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
    @given(
        packing=st.sampled_from(["best_fit", "first_fit", None]), used=st.integers(0, 30), prefetch=st.integers(0, 3)
    )
    def test_goes_on_at_any_batch(self, make, packing, used, prefetch):
        endless = iter(make(packing=packing, window=7, repeat=True))
        batches = [next(endless) for _ in range(40)]
        endless.close()
        one = make(packing=packing, window=7, prefetch=prefetch)
        state = json.loads(json.dumps(one.get_state(used)))
        assert (state["epoch"], state["batch"]) == divmod(used, len(one))
        other = make(packing=packing, window=7)
        other.set_state(state)
        rest = list(other)
        assert len(rest) == len(one) - used % len(one)  # to the end of the epoch
        rest += list(other)
        assert_equal(rest[:7], batches[used : used + 7])

    def test_counts_what_was_handed_out(self, make):
        dataset = make(repeat=True)
        batches = iter(dataset)
        for _ in range(3):
            next(batches)
        assert dataset.get_state()["batch"] == 3
        expected = next(batches)
        batches.close()
        other = make(repeat=True)
        other.set_state(dataset.get_state(3))
        assert_equal([next(iter(other))], [expected])
        assert other.get_state(1)["batch"] == 4  # counted from where it was set

    def test_an_iteration_that_is_not_finished_begins_anew(self, make):
        dataset = make()
        first = next(iter(dataset))
        assert_equal([first], [next(iter(dataset))])

    def test_another_dataset_is_refused(self, make, tokenizer):
        state = make().get_state()
        for other, message in (
            (make(sequence_length=192), "sequence_length was 100, is 192"),
            (make(CHATS[1:]), "documents was '.*records was 23, is 22"),
            (make(seed=4), "seed was 0, is 4"),
            (make(enable_thinking=False), "template_variables was {}, is {'enable_thinking': False}"),
        ):
            with pytest.raises(ValueError, match=message):
                other.set_state(state)
        other = QwenTokenizer.train(["something else"], 270)
        with pytest.raises(ValueError, match="the position belongs to another dataset: tokenizer was"):
            ChatDataset(CHATS, other, sequence_length=100, batch_size=2).set_state(state)
        template = tokenizer.chat_template
        tokenizer.chat_template = template + "\n"
        try:
            with pytest.raises(ValueError, match="chat_template was"):
                make().set_state(state)
        finally:
            tokenizer.chat_template = template
        with pytest.raises(ValueError, match="a state of ChatDataset has"):
            make().set_state({"epoch": 3})

    def test_the_rest_may_differ(self, make):
        dataset = make(prefetch=0)
        dataset.set_state(make(prefetch=5, repeat=True).get_state(3))
        assert dataset.get_state()["batch"] == 3


class TestBadRecords:
    BAD = (
        ({"messages": [QUESTION]}, "no assistant message"),
        (
            {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}]},
            "a user speaks before",
        ),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}, "content is empty"),
        ({"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "a"}]}, "must be a str"),
        ({"messages": "hello"}, "messages must be a list"),
        ({"question": "q"}, "this one has question"),
    )

    @pytest.mark.parametrize(("record", "message"), BAD)
    def test_are_named_or_counted(self, make, tmp_path, record, message):
        path = tmp_path / "chats.jsonl"
        path.write_text("\n".join(json.dumps(r) for r in (CHATS[0], record, CHATS[1])))
        with pytest.raises(ValueError, match=message) as error:
            make(path)
        assert str(error.value).startswith(f"{path}, line 2: ") and "on_error='skip'" in str(error.value)
        dataset = make(path, on_error="skip")
        assert (dataset.statistics.documents, dataset.statistics.skipped) == (3, 1)
        assert list(dataset.statistics.reasons.values()) == [1]
        assert dataset.statistics.first_skipped.startswith(f"{path}, line 2: ")
        assert f"{path}, line 2" in str(dataset.statistics)
        assert len(documents_in(dataset)) == 2

    def test_lines_that_are_no_json(self, make, tmp_path):
        path = tmp_path / "chats.jsonl"
        path.write_text(json.dumps(CHATS[0]) + "\n{nonsense\n{more\n")
        with pytest.raises(ValueError, match=r"chats\.jsonl, line 2: not JSON"):
            make(path)
        assert list(make(path, on_error="skip").statistics.reasons.values()) == [2]  # one reason

    def test_nothing_left(self, make):
        with pytest.raises(
            ValueError, match=r"(?s)source holds nothing to train on.*skipped 1: .*no assistant message"
        ):
            make([self.BAD[0][0]], on_error="skip")
        with pytest.raises(ValueError, match="holds no record"):
            make([])

    def test_too_long(self, make):
        with pytest.raises(ValueError, match=r"source\[2\]: 44 tokens do not fit into sequence_length=40: raise it"):
            make(CHATS[:4], sequence_length=40)
        dropped = make(CHATS[:4], sequence_length=40, too_long="drop")
        split = make(CHATS[:4], sequence_length=40, too_long="split")
        assert (dropped.statistics.dropped, split.statistics.split) == (2, 2)
        assert dropped.statistics.examples == 2 and split.statistics.examples > 4
        assert split.statistics.trained_tokens == make(CHATS[:4], sequence_length=400).statistics.trained_tokens


def test_raw_texts(make, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("once upon a time\nthere was\n")
    (tmp_path / "b.txt").write_text("the end")
    dataset = make(str(tmp_path / "*.txt"), shuffle=False, packing="first_fit", batch_size=1)
    ((inputs, labels, weights),) = list(dataset)
    end = tokenizer.pad_token_id
    first = [*tokenizer.encode("once upon a time\nthere was\n"), end]
    second = [*tokenizer.encode("the end"), end]
    assert documents_in([(inputs, labels, weights)]) == sorted([(first, first[1:]), (second, second[1:])])


def test_records_with_template_variables_of_their_own(make, tokenizer):
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ preface }}" + template
    try:
        records = [CHATS[0], {**CHATS[0], "chat_template_kwargs": {"preface": "B"}}]
        (batch,) = list(make(records, shuffle=False, packing="first_fit", sequence_length=200, preface="A"))
        begins = sorted(tokenizer.decode(ids[:1]) for ids, _ in documents_in([batch]))
    finally:
        tokenizer.chat_template = template
    assert begins == ["A", "B"]


def test_kept_between_runs(make, tmp_path, monkeypatch):
    first = list(make(cache_dir=tmp_path / "cache"))
    monkeypatch.setattr("keras_qwen.data.store._write", lambda *_: pytest.fail("encoded again"))
    again = make(cache_dir=tmp_path / "cache")
    assert_equal(first, again)
    assert again.statistics == make(cache_dir=tmp_path / "cache").statistics
    assert len(list((tmp_path / "cache").iterdir())) == 1
    with pytest.raises(pytest.fail.Exception, match="encoded again"):
        make(cache_dir=tmp_path / "cache", sequence_length=200)
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing half-written


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(packing="tight"), "packing must be one of 'best_fit', 'first_fit', None"),
        (dict(batch_size=0), "batch_size must be an integer of at least 1"),
        (dict(sequence_length=1.5), "sequence_length must be an integer"),
        (dict(on_error="ignore"), "on_error must be one of"),
        (dict(too_long="cut"), "too_long must be one of"),
        (dict(shard_index=2, shard_count=2), "shard_index=2 has to be less"),
        (dict(bucket_lengths=[100]), "bucket_lengths are for packing=None"),
        (dict(bucket_lengths=[80], packing=None), "end with sequence_length=100"),
        (dict(workers=True), "workers must be an integer"),
        (dict(tokenize=False), "encode_chat sets tokenize itself"),
    ],
)
def test_settings_are_checked(make, setting, message):
    with pytest.raises(ValueError, match=message):
        make(**setting)


class TestPreferences:
    PAIRS = (
        {"prompt": "Is it?", "chosen": "Yes, it is.", "rejected": "No."},
        {
            "chosen": [
                *CHATS[0]["messages"],
                {"role": "user", "content": "So?"},
                {"role": "assistant", "content": "Yes"},
            ],
            "rejected": [
                *CHATS[0]["messages"],
                {"role": "user", "content": "So?"},
                {"role": "assistant", "content": "No"},
            ],
        },
        {"prompt": "And?", "chosen": "One and two.", "rejected": "Three is one and two."},
    )

    def test_rows_stand_side_by_side(self, tokenizer):
        dataset = PreferenceDataset(list(self.PAIRS), tokenizer, sequence_length=100, batch_size=2)
        assert len(dataset) == 2 and dataset.batch_size == 4
        found = []
        for _, labels, weights in dataset:
            assert labels.shape[0] == 4
            texts = [tokenizer.decode(row[w > 0]) for row, w in zip(labels, weights, strict=True)]
            found += list(zip(texts[::2], texts[1::2], strict=True))
        end = "<|im_end|>"
        assert sorted(found) == sorted(
            [
                ("", ""),  # fills the batch up
                (f"Yes, it is.{end}", f"No.{end}"),
                (f"Yes{end}", f"No{end}"),  # of the prompt's own answer nothing
                (f"One and two.{end}", f"Three is one and two.{end}"),
            ]
        )

    def test_too_long_pairs_and_packing(self, tokenizer):
        settings = dict(tokenizer=tokenizer, sequence_length=45, batch_size=1)
        dataset = PreferenceDataset(list(self.PAIRS), too_long="drop", **settings)
        assert dataset.statistics.dropped == 1 and len(dataset) == 2
        with pytest.raises(ValueError, match="too_long must be one of 'raise', 'drop'"):
            PreferenceDataset(list(self.PAIRS), too_long="split", **settings)
        with pytest.raises(ValueError, match="pairs are not packed"):
            PreferenceDataset(list(self.PAIRS), packing="best_fit", **settings)
        with pytest.raises(ValueError, match=r"source\[0\]: a preference has prompt, chosen and rejected"):
            PreferenceDataset([{"prompt": "q"}], **settings)


def test_worker_processes_change_nothing(make, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(chat) for chat in CHATS * 5) + "\n{nonsense\n")
    alone, two = (make(path, on_error="skip", workers=workers) for workers in (0, 2))
    assert_equal(alone, two)
    assert alone.statistics == two.statistics and alone.fingerprint() == two.fingerprint()
    with pytest.raises(ValueError, match="line 116: not JSON"):
        make(path, workers=1)
