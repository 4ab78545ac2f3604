"""The collectives of a compiled program, and the bytes that each moves, read from its HLO text."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

# Bytes of an element by HLO's name of its type.
ELEMENT_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8,
}  # fmt: skip

_OP = re.compile(
    r"= (?P<shape>.+?) (?P<op>all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
# Replica groups are a list of lists, {{0,1},{2,3}}, or an iota, [groups,size]<=[devices], or axes of a mesh,
# mesh['data'=2,'model'=4] {'model'}.
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[(\d+),(\d+)\]<=|mesh\[([^\]]*)\][^{]*\{([^}]*)\})")
# TPUs' compiler spreads a collective over a chain of fusions with other work, each of which shows it in full.
_CHAIN = re.compile(r'chain_id="(\d+)"')
_AXIS = re.compile(r"'(\w+)'=(\d+)")


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
      op: `all-to-all`, `all-gather`, `all-reduce`, `reduce-scatter`, `collective-permute`.
      devices: How many take part in one group of it.
      result_bytes: Of its result on one device.
    """

    op: str
    devices: int
    result_bytes: int

    @property
    def received_bytes(self) -> float:
        """What one device must receive: exact but for `all-reduce`, for which it is that of a ring."""
        others = self.devices - 1
        if self.op == "all-reduce":
            return 2 * self.result_bytes * others / self.devices
        if self.op == "reduce-scatter":
            return self.result_bytes * others
        if self.op == "collective-permute":
            return self.result_bytes
        return self.result_bytes * others / self.devices


def collectives(compiled: Any) -> list[Collective]:
    """Returns the collectives of a `jax.stages.Compiled`, each once, whatever the number of times that it runs.

    Raises:
      ValueError: An operation is not understood.
    """
    found, chains = [], set()
    for line in compiled.as_text().splitlines():
        match = _OP.search(line)
        if match is None:
            continue
        chain = _CHAIN.search(line)
        if chain is not None:
            link = match["op"], chain[1]
            if link in chains:
                continue
            chains.add(link)
        groups = _GROUPS.search(line)
        if groups is None:
            raise ValueError(f"the replica groups of this operation are not understood: {line.strip()}")
        devices = _group_size(groups)
        arrays = _ARRAY.findall(match["shape"])
        if match["start"]:  # Its tuple holds the operand and the result.
            arrays = arrays[len(arrays) // 2 :]
        size = sum(ELEMENT_BYTES[kind] * math.prod(int(n) for n in shape.split(",") if n) for kind, shape in arrays)
        found.append(Collective(match["op"], devices, size))
    return found


def _group_size(groups: re.Match[str]) -> int:
    if groups[1]:
        return len(groups[1].split(","))
    if groups[3]:
        return int(groups[3])
    sizes = {name: int(size) for name, size in _AXIS.findall(groups[4])}
    return math.prod(sizes[name.strip("' ")] for name in groups[5].split(","))
