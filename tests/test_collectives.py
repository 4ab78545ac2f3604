"""Reading the collectives of a compiled program: each form in which XLA writes them."""

import types

import pytest

from jaxrec.profiling.collectives import Collective, collectives
from jaxrec.profiling.copies import copied_bytes

LINES = {
    '%a = f32[8,64]{1,0} all-to-all(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}':
        (Collective("all-to-all", 4, 2048), 1536),
    '%a = (f32[2,64]{1,0}, f32[8,64]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}':
        (Collective("all-gather", 4, 2048), 1536),
    "%a = bf16[8,1,512]{2,1,0:T(2,128)(2,1)} all-gather(%x), replica_groups=mesh['data'=2,'model'=8] {'model'}":
        (Collective("all-gather", 8, 8192), 7168),
    "%a = ((f32[100]{0}), f32[100]{0}) all-reduce-start(%x), replica_groups=mesh['data'=2,'model'=8] {'data','model'}":
        (Collective("all-reduce", 16, 400), 750),
    '%a = f32[25]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4], dimensions={0}':
        (Collective("reduce-scatter", 4, 100), 300),
    '%a = (s32[10]{0}, u16[6]{0}) all-to-all(%x, %y), replica_groups={{0,1}}, dimensions={0}':
        (Collective("all-to-all", 2, 52), 26),
}  # fmt: skip


def read(*lines: str) -> list[Collective]:
    return collectives(types.SimpleNamespace(as_text=lambda: "\n".join(lines)))


@pytest.mark.parametrize("line", list(LINES), ids=range(len(LINES)))
def test_forms(line):
    expected, received = LINES[line]
    (found,) = read("HloModule m", line, "  %b = f32[8] add(%a, %a)")
    assert found == expected and found.received_bytes == received


def test_the_links_of_a_chain_count_once():
    line = '%a.{} = f32[8]{{0}} all-gather(%x), replica_groups={{{{0,1}}}}, frontend_attributes={{chain_id="{}"}}'
    assert len(read(line.format(1, 0), line.format(2, 0), line.format(3, 1))) == 2


def test_groups_that_are_not_understood_are_an_error():
    with pytest.raises(ValueError, match="replica groups"):
        read("%a = f32[8]{0} all-gather(%x), replica_groups=somehow, dimensions={0}")


def test_large_copies_are_summed():
    text = "\n".join([
        "  %copy.1 = f32[1000,64]{1,0:T(8,128)} copy(%x), metadata={}",
        "  %copy.2 = u16[100,64]{1,0} copy(%x)",
        "  %copy.3 = f32[10]{0} copy(%x)",
        "  %b = f32[1000,64]{1,0} add(%copy.1, %copy.1)",
    ])  # fmt: skip
    program = types.SimpleNamespace(as_text=lambda: text)
    assert [copied_bytes(program, least) for least in (1, 12_800, 12_801, 10**9)] == [268_840, 268_800, 256_000, 0]
