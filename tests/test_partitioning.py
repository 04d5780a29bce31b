"""How parameters and activations are split over a mesh."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_qwen.config import QwenConfig
from keras_qwen.parameters import adapter_table, parameter_table, projections
from keras_qwen.partitioning import (
    activation_partition,
    batch_shards,
    checked_mesh,
    devices_of,
    partition,
    update_partition,
)


def config(heads=14, kv_heads=2, hidden=56, intermediate=96, vocab=160, **more):
    return QwenConfig(
        model_type="qwen2", vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=4, **more,
    )  # fmt: skip


def of(path, mesh, model=None):
    model = model or config()
    row = next(row for row in parameter_table(model) if row.path.endswith(path))
    return partition(row, model, mesh)


def test_heads_go_over_model_and_the_other_dimension_over_fsdp():
    mesh = {"data": 2, "fsdp": 2, "model": 2}
    assert of("q_proj/kernel", mesh).dimensions == (("fsdp",), ("model",))
    assert of("o_proj/kernel", mesh).dimensions == (("model",), ("fsdp",))
    assert of("down_proj/kernel", mesh).dimensions == (("model",), ("fsdp",))
    assert of("embeddings", mesh).dimensions == (("model",), ("fsdp",))
    assert of("q_proj/bias", mesh).dimensions == (("model",),)
    assert of("norm/scale", mesh).dimensions == ((),)


def test_what_does_not_divide_falls_back_and_says_so():
    key = of("k_proj/kernel", {"model": 4})
    assert key.dimensions == ((), ()) and "2 key/value heads" in key.note
    query = of("q_proj/kernel", {"model": 4})
    assert query.dimensions == (("model",), ()) and "14 is not divided by model=4: embed" in query.note
    table = of("embeddings", {"fsdp": 2, "model": 8}, config(vocab=157, hidden=48))
    assert table.dimensions == ((), ("model", "fsdp")) and "157" in table.note
    nowhere = of("embeddings", {"fsdp": 8}, config(vocab=157, hidden=54, heads=2))
    assert nowhere.dimensions == ((), ()) and "no dimension" in nowhere.note


def test_whole_heads_stay_together():
    """32 columns of 8 heads are divided by 16, the heads are not."""
    assert of("q_proj/kernel", {"model": 16}, config(heads=8, kv_heads=8, hidden=32)).dimensions == (("model",), ())


def test_adapters_lie_as_the_matrices_they_change():
    model = config()
    table = parameter_table(model)
    rows = adapter_table(table, name="a", ranks=dict.fromkeys(projections(table), 8), use_dora=True)
    found = {row.path: partition(row, model, {"fsdp": 2, "model": 2}).dimensions for row in rows}
    assert found["layers_0/self_attn/q_proj/lora_a/A"] == (("fsdp",), ())
    assert found["layers_0/self_attn/q_proj/lora_a/B"] == ((), ("model",)) or found[
        "layers_0/self_attn/q_proj/lora_a/B"
    ] == ((), ("model", "fsdp"))
    assert found["layers_1/mlp/down_proj/lora_a/A"][0][0] == "model"
    assert found["layers_1/mlp/gate_proj/lora_a/magnitude"] == (("model",),)


sizes = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(
    data=sizes, fsdp=sizes, model_axis=sizes, heads=st.sampled_from([1, 2, 6, 8, 14]), hidden=st.integers(2, 96),
    intermediate=st.integers(1, 96), vocab=st.integers(2, 200), shard_optimizer=st.booleans(),
)  # fmt: skip
def test_every_split_is_even_and_uses_an_axis_once(
    data, fsdp, model_axis, heads, hidden, intermediate, vocab, shard_optimizer
):
    kv_heads = 2 if heads % 2 == 0 else 1
    model = config(heads, kv_heads, hidden, intermediate, vocab)
    mesh = {"model": model_axis, "data": data, "fsdp": fsdp}
    for row in parameter_table(model):
        split = partition(row, model, mesh)
        update = update_partition(split, row.shape, mesh, shard_optimizer=shard_optimizer)
        for one in (split, update):
            used = [axis for axes in one.dimensions for axis in axes]
            assert len(used) == len(set(used))
            for size, axes in zip(row.shape, one.dimensions, strict=True):
                assert size % math.prod(mesh[axis] for axis in axes) == 0
            assert math.prod(one.local_shape(row.shape, mesh)) * one.ways(mesh) == row.size
        assert update.ways(mesh) >= split.ways(mesh)
        if len(row.shape) == 2 and "kv_heads" not in row.axes:
            for ways in (model_axis, fsdp):  # alone, an axis is used wherever it divides anything
                only = partition(row, model, {"model": ways})
                if any(size % ways == 0 for size in row.shape) and not row.axes[1] == "heads":
                    assert only.ways({"model": ways}) == ways or "heads" in row.axes


def test_the_optimizer_is_split_over_data_where_there_is_room():
    whole = of("gate_proj/kernel", {"data": 8})
    split = update_partition(whole, (56, 96), {"data": 8}, shard_optimizer=True)
    assert split.ways({"data": 8}) == 8
    assert update_partition(whole, (56, 96), {"data": 8}, shard_optimizer=False) == whole
    assert update_partition(of("norm/scale", {"data": 8}), (56,), {"data": 8}, shard_optimizer=True).ways(
        {"data": 8}
    ) == 1  # fmt: skip


def test_activations():
    mesh = {"data": 2, "fsdp": 2, "model": 4}
    split = lambda axes, shape, **more: activation_partition(axes, shape, mesh, **more).dimensions  # noqa: E731
    assert split(("batch", "residual", "embed"), (8, 16, 32)) == (("data", "fsdp"), (), ())
    assert split(("batch", "residual", "embed"), (8, 16, 32), sequence_parallel=True)[1] == ("model",)
    assert split(("batch", "residual", "embed"), (8, 15, 32), sequence_parallel=True)[1] == ()
    assert split(("batch", "length", "heads", "head_dim"), (6, 16, 8, 4)) == ((), (), ("model",), ())
    assert split(("tokens", "vocab"), (None, 160)) == ((), ("model",))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({}, "A mesh is a dict"),
        ({"batch": 2}, "Unknown mesh axes"),
        ({"data": 0}, "positive"),
        ({"data": -2}, "positive"),
        ({"data": True}, "positive"),
        ({"model": 2.0}, "positive"),
        ([2, 4], "A mesh is a dict"),
    ],
)
def test_bad_meshes(mesh, message):
    with pytest.raises(ValueError, match=message):
        checked_mesh(mesh)


def test_counts():
    mesh = checked_mesh({"model": 4, "fsdp": 2, "data": 3})
    assert list(mesh) == ["model", "fsdp", "data"]
    assert (devices_of(mesh), batch_shards(mesh)) == (24, 6)
