"""Packing: every label is kept once, none crosses a document, and rows are few."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_qwen.data.packing import fit_rows, pack

DOCUMENTS = st.lists(st.lists(st.tuples(st.integers(1, 99), st.booleans()), min_size=2, max_size=9), min_size=1)


def examples_of(documents):
    return [{"token_ids": [t for t, _ in d], "assistant_mask": [int(m) for _, m in d]} for d in documents]


def example(*ids):
    return {"token_ids": list(ids), "assistant_mask": [1] * len(ids)}


def documents_in(packed):
    """Undo packing: tokens of each document, and the weights of its labels."""
    found = []
    for ids, segments, labels, weights in zip(
        packed.inputs["token_ids"], packed.inputs["segment_ids"], packed.labels, packed.loss_weights, strict=True
    ):
        assert np.all(weights[segments == 0] == 0) and np.all(np.diff(segments[segments > 0]) >= 0)
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert np.array_equal(ids[here][1:], labels[here][:-1])  # labels follow inside the document
            found.append(([*ids[here].tolist(), labels[here][-1]], weights[here].tolist()))
    return sorted(found)


@given(DOCUMENTS, st.sampled_from(["best_fit", "first_fit"]), st.integers(8, 20))
def test_every_document_once(documents, packing, length):
    examples = [e for e in examples_of(documents) if any(e["assistant_mask"][1:])]
    if not examples:
        return
    packed = pack(examples, length, packing=packing)
    assert documents_in(packed) == sorted(
        (e["token_ids"], [float(m) for m in e["assistant_mask"][1:]]) for e in examples
    )
    filled = int((packed.inputs["segment_ids"] > 0).sum())
    assert packed.fill_rate == filled / packed.labels.size
    assert (packed.split, packed.dropped) == (0, 0)


@given(DOCUMENTS, st.sampled_from(["best_fit", "first_fit"]), st.integers(1, 4))
def test_split_documents_keep_every_label(documents, packing, length):
    examples = [example(*(t for t, _ in d)) for d in documents]
    packed = pack(examples, length, packing=packing, too_long="split")
    labels = packed.labels[packed.loss_weights == 1]
    assert sorted(labels) == sorted(t for e in examples for t in e["token_ids"][1:])
    inputs = packed.inputs["token_ids"][packed.inputs["segment_ids"] > 0]
    assert sorted(inputs) == sorted(t for e in examples for t in e["token_ids"][:-1])
    assert packed.split == sum(len(e["token_ids"]) > length + 1 for e in examples)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.randoms())
def test_rows_of_best_fit_follow_from_the_lengths_alone(lengths, random):
    rows = fit_rows(lengths, 16, "best_fit")
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 16 for row in rows)
    shuffled = random.sample(lengths, len(lengths))
    assert len(fit_rows(shuffled, 16, "best_fit")) == len(rows)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 16) * 2  # never worse than half full


def test_which_row_is_chosen():
    # 6 and 5 open rows; 4 fits both: best fit takes the one where nothing is left.
    assert fit_rows([5, 6, 4], 10, "best_fit") == [[1, 2], [0]]
    assert fit_rows([5, 6, 4], 10, "first_fit") == [[0, 2], [1]]
    assert fit_rows([3, 8, 3, 4, 2], 10, "first_fit") == [[0, 2, 3], [1, 4]]


def test_the_arrays():
    packed = pack([example(5, 6, 7), {"token_ids": [8, 9], "assistant_mask": [0, 1]}], 4, pad_token_id=1)
    np.testing.assert_array_equal(packed.inputs["token_ids"], [[5, 6, 8, 1]])
    np.testing.assert_array_equal(packed.inputs["segment_ids"], [[1, 1, 2, 0]])
    np.testing.assert_array_equal(packed.labels, [[6, 7, 9, 1]])
    np.testing.assert_array_equal(packed.loss_weights, [[1, 1, 1, 0]])
    assert packed.fill_rate == 0.75
    assert [a.dtype for a in (*packed.inputs.values(), *packed[1:3])] == ["int32", "int32", "int32", "float32"]


def test_too_long():
    examples = [example(1, 2, 3, 4, 5), example(6, 7)]
    with pytest.raises(ValueError, match="example 0 has 5 tokens, a row takes 4.*'split' or 'drop'"):
        pack(examples, 3)
    packed = pack(examples, 3, too_long="drop")
    assert packed.dropped == 1 and documents_in(packed) == [([6, 7], [1.0])]
    packed = pack(examples, 3, too_long="split")
    assert packed.split == 1
    assert documents_in(packed) == [([1, 2, 3, 4], [1.0] * 3), ([4, 5], [1.0]), ([6, 7], [1.0])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(packing="tight"), "packing must be one of"),
        (dict(too_long="cut"), "too_long must be one of"),
        (dict(examples=[]), "no example to pack"),
        (dict(examples=[{"token_ids": [1, 2], "assistant_mask": [1]}]), "example 0 has .* different lengths"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack(**{"examples": [example(1, 2)], "sequence_length": 4, **arguments})
