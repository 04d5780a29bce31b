"""Rows of a table by index, with a dense gradient that counts repeated indices, alone or shared with a tied head."""

import importlib

import keras
from keras import ops


def embedding_lookup(table, ids):
    """Vectors of token ids.

    The gradient of the table is dense on every backend, where TensorFlow's own is a list of slices that Keras's Adam
    family squares before it adds up repeated ids. Repeated ids are summed in float32 whatever the table's dtype.

    Args:
        table: (vocab, hidden_size).
        ids: (...) int, rows of table.

    Returns:
        (..., hidden_size) vectors in the dtype of table.

    Raises:
        ValueError: table is not a matrix, or ids are not integers.

    Example:
        >>> embedding_lookup(keras.ops.eye(3), [[2, 0]]).shape
        (1, 2, 3)
    """
    return _lookup(table, ids, connected=False)[0]


def shared_embedding(table, ids):
    """Vectors of token ids, and the table again for a head that is tied to it.

    A tied table has two gradients, the head's and the lookup's, which are commonly two arrays of its size and their
    sum a third. A head that takes the table this function returns hands its gradient back through here, and the
    lookup's rows are added into that array. So the table returned must have one use that is differentiated, whose
    gradient is an array of its own; that of a linear layer or `linear_cross_entropy` is.

    Args:
        table: (vocab, hidden_size).
        ids: (...) int, rows of table.

    Returns:
        (vectors (..., hidden_size), table), in the dtype of table.

    Raises:
        ValueError: table is not a matrix, or ids are not integers.

    Example:
        >>> vectors, table = shared_embedding(embeddings, token_ids)
        >>> linear_cross_entropy(decoder(vectors), table, labels, transposed=True).loss
    """
    return _lookup(table, ids, connected=True)


def _lookup(table, ids, connected):
    table, ids = ops.convert_to_tensor(table), ops.convert_to_tensor(ids)
    if len(table.shape) != 2:
        raise ValueError(f"table must have the shape (vocab, hidden_size), not {tuple(table.shape)}.")
    if not keras.backend.is_int_dtype(ids.dtype):
        raise ValueError(f"ids must be integers, not {keras.backend.standardize_dtype(ids.dtype)}.")
    backend = keras.backend.backend()
    if backend == "torch":  # its gradient is dense, and accumulated in place, as it is
        return ops.take(table, ids, axis=0), table
    return importlib.import_module(f"keras_qwen.ops.embedding_lookup_{backend}").shared_embedding(table, ids, connected)
