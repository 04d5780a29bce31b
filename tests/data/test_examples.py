import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_qwen.data.examples import next_token_arrays

TWO = [
    {"token_ids": [5, 6, 7, 8], "assistant_mask": [0, 0, 1, 1]},
    {"token_ids": [9, 4], "assistant_mask": [1, 1]},
]


def test_labels_are_the_next_tokens():
    inputs, labels, loss_weights = next_token_arrays(TWO, pad_token_id=1)
    np.testing.assert_array_equal(inputs["token_ids"], [[5, 6, 7], [9, 1, 1]])
    np.testing.assert_array_equal(inputs["padding_mask"], [[1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(labels, [[6, 7, 8], [4, 1, 1]])
    np.testing.assert_array_equal(loss_weights, [[0, 1, 1], [1, 0, 0]])
    types = [array.dtype for array in (*inputs.values(), labels, loss_weights)]
    assert types == ["int32", "int32", "int32", "float32"]


@given(st.lists(st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1), min_size=1), st.integers(0, 5))
def test_every_produced_token_but_a_first_one_is_trained_on_once(chats, room):
    examples = [
        {"token_ids": np.array([t for t, _ in chat]), "assistant_mask": np.array([m for _, m in chat])}
        for chat in chats
    ]
    length = max(len(chat) for chat in chats) - 1 + room
    inputs, labels, loss_weights = next_token_arrays(examples, length)
    for row, chat in enumerate(chats):
        assert labels[row][loss_weights[row] == 1].tolist() == [token for token, produced in chat[1:] if produced]
        real = inputs["padding_mask"][row] == 1
        assert inputs["token_ids"][row][real].tolist() == [token for token, _ in chat[:-1]]
    assert set(np.unique(loss_weights)) <= {0.0, 1.0}


def test_errors_name_the_example():
    with pytest.raises(ValueError, match="example 0 needs 3 positions, a row has 2"):
        next_token_arrays(TWO, length=2)
    with pytest.raises(ValueError, match="example 1 has 2 token_ids and 1 values"):
        next_token_arrays([TWO[0], {"token_ids": [1, 2], "assistant_mask": [1]}])
    with pytest.raises(ValueError, match="no example"):
        next_token_arrays([])
