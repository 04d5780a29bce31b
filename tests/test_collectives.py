"""Collectives read from XLA's text."""

import pytest

from keras_qwen.collectives import Collective, bytes_by_axis, read_collectives

MESH = {"fsdp": 2, "model": 8}
TEXT = """HloModule step

%all-reduce-scatter (input: bf16[4,8,10]) -> bf16[4,1,10] {
  %input = bf16[4,8,10]{2,1,0} parameter(0)
  %all-reduce.1 = bf16[4,8,10]{2,1,0} all-reduce(%input), replica_groups=[2,8]<=[16], to_apply=%sum
  ROOT %slice = bf16[4,1,10]{2,1,0} dynamic-slice(%all-reduce.1)
}

%body (p: (f32[16], u32[])) -> (f32[16], u32[]) {
  %p = (f32[16]{0}, u32[]) parameter(0)
  %two = u32[] constant(2)
  %x = f32[16]{0} get-tuple-element(%p), index=0
  %i = u32[] get-tuple-element(%p), index=1
  %moved = f32[16]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2}}
  %next = u32[] add(%i, %two)
  ROOT %out = (f32[16]{0}, u32[]) tuple(%moved, %next)
}

%cond (q: (f32[16], u32[])) -> pred[] {
  %q = (f32[16]{0}, u32[]) parameter(0)
  %end = u32[] constant(6)
  %j = u32[] get-tuple-element(%q), index=1
  ROOT %less = pred[] compare(%j, %end), direction=LT
}

%open (r: (f32[4])) -> (f32[4]) {
  %r = (f32[4]{0}) parameter(0)
  %y = f32[4]{0} get-tuple-element(%r), index=0
  %all = f32[4]{0} all-reduce(%y), replica_groups={{0,8},{1,9}}, to_apply=%sum
  ROOT %o = (f32[4]{0}) tuple(%all)
}

%until (s: (f32[4])) -> pred[] {
  %s = (f32[4]{0}) parameter(0)
  ROOT %ask = pred[] custom-call(%s)
}

ENTRY %main (a: f32[16]) -> f32[16] {
  %a = f32[16]{0} parameter(0), metadata={op_name="x" text="
}}, several lines"}
  %g = bf16[64,32]{1,0} all-gather(%a), replica_groups=mesh['axis_0'=8,'axis_1'=1,'axis_2'=2], device_ids=([2,8]T(1,0)) {'axis_2'}, dimensions={0}
  %s = (f32[8]{0}, f32[64]{0}) all-gather-start(%a), replica_groups=[2,8]<=[16], dimensions={0}
  %c = bf16[4,1,10]{2,1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter
  %w = (f32[16]{0}, u32[]) while(%t), condition=%cond, body=%body
  %v = (f32[4]{0}) while(%u), condition=%until, body=%open
  %n = (f32[4]{0}) while(%u), condition=%until, body=%open, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %r = f32[16]{0} reduce-scatter(%a), replica_groups=[8,2]<=[2,8]T(1,0), to_apply=%sum
}
"""  # noqa: E501


def test_kinds_bytes_axes_and_turns():
    found = read_collectives(TEXT, MESH)
    assert found == [
        Collective("all-gather", ("fsdp",), 64 * 32 * 2 / 2, 1, True),
        Collective("all-gather", ("model",), 64 * 4 * 7 / 8, 1, True),
        Collective("reduce-scatter", ("model",), 4 * 8 * 10 * 2 * 7 / 8, 1, True),
        Collective("collective-permute", ("model",), 64.0, 3, True),
        Collective("all-reduce", ("fsdp",), 2 * 16 / 2, 1, False),
        Collective("all-reduce", ("fsdp",), 2 * 16 / 2, 5, True),
        Collective("reduce-scatter", ("fsdp",), 2 * 64 / 2, 1, True),
    ]
    by_axis = bytes_by_axis(found)
    assert by_axis["model"] == pytest.approx(224 + 560 + 192)
    assert by_axis["fsdp"] == pytest.approx(2048 + 16 + 80 + 64)


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from keras_qwen.collectives import bytes_by_axis, read_collectives
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "model"))

def traffic(function, *specs):
    given = [jax.ShapeDtypeStruct((64, 32), "float32", sharding=NamedSharding(mesh, spec)) for spec in specs[:-1]]
    out = NamedSharding(mesh, specs[-1])
    text = jax.jit(function, out_shardings=out).lower(*given).compile().as_text()
    return bytes_by_axis(read_collectives(text, {"fsdp": 2, "model": 4}))

report(
    gather=traffic(lambda x: x * 2, P("model"), P()),
    reduce=traffic(lambda x: jnp.broadcast_to(x.sum(0), (64, 32)), P("fsdp"), P()),
    nothing=traffic(lambda x: x * 2, P("model"), P("model")),
)
"""


def test_what_jax_compiles(on_devices):
    [found] = on_devices(PROGRAM)
    assert found["gather"] == {"model": 64 * 32 * 4 * 3 / 4}
    assert found["reduce"] == {"fsdp": 2 * 32 * 4 / 2}
    assert found["nothing"] == {}
