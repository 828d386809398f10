"""Count instructions of a compiled kernel along its loops: per key tile, per mask, per span.

Counts are those of one warp. They come from the control-flow graph of the machine code; nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\d+\s+|@!?U?PT\s+)?([A-Z][\w.]*)(.*?);")
LABEL = re.compile(r"^(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
NAME = re.compile(r"\.L_x_\d+")
MATRIX = re.compile(r"HGMMA|HMMA|UTC\w*MMA|QMMA")
SPILL = re.compile(r"^(LDL|STL)")
LEAST = (
    24  # instructions: a branch around fewer is part of the plain path (the one thread that starts a product, waits)
)


@dataclass(frozen=True)
class Counts:
    """Instructions of one warp: for a key tile, for a mask on it, beside the tiles of a span, and spills in the loop.

    `restarts` is 1 where the loop over tiles, and so its pipeline, begins anew for every span.
    """

    tile: int
    mask: int
    span: int
    spills: int
    restarts: int


class Program:
    """The control-flow graph of one kernel, from the text of nvdisasm."""

    def __init__(self, text: str) -> None:
        self.graph, self.code = nx.DiGraph(), {}
        self._read(text)

    def counts(self) -> Counts:
        """What a key tile, a mask and a span cost; ValueError where no loop multiplies matrices."""
        loops = [loop for loop in self.loops if any(map(MATRIX.match, self._opcodes(loop.nodes)))]
        inner = [loop for loop in loops if not any(other.nodes < loop.nodes for other in loops)]
        if not inner:
            raise ValueError("no loop of the kernel multiplies matrices.")
        lengths = {loop: self.lengths(loop) for loop in inner}
        main = min(inner, key=lambda loop: lengths[loop][0])
        tile, mask, span = lengths[main]
        masked = [length for loop, (length, *_) in lengths.items() if loop is not main]
        outer = [loop for loop in loops if main.nodes < loop.nodes]
        if masked:
            mask = max(masked) - tile
        if outer:
            smallest = min(outer, key=lambda loop: len(loop.nodes))
            inside = frozenset().union(*(loop.nodes for loop in inner))
            span = self._longest(self._acyclic(smallest), smallest.header, None, free=inside)
        spills = sum(bool(SPILL.match(opcode)) for opcode in self._opcodes(main.nodes))
        return Counts(tile, mask, span, spills, int(bool(outer)))

    def _read(self, text: str) -> None:
        """Blocks end where a label stands or a branch leaves."""
        block, falls = "entry", True
        self._add(block)
        for line in text.splitlines():
            if label := LABEL.match(line):
                if falls and label[1] != block:
                    self.graph.add_edge(block, label[1])
                block, falls = label[1], True
                self._add(block)
            elif found := INSTRUCTION.search(line):
                address, predicate, opcode, rest = found.groups()
                self.code[block].append(opcode)
                target = TARGET.search(rest)
                always = not predicate and not re.search(r"\bU?P\d", rest.split("`")[0])
                # a call without return address is a jump
                jumps = opcode.startswith(("BRA", "CALL.REL.NOINC")) and target is not None
                if target and jumps:
                    self.graph.add_edge(block, target[1])
                if opcode == "BRX":  # by a table: to each part of specialised warps
                    self.graph.add_edges_from((block, to) for to in NAME.findall(rest))
                if jumps or opcode.startswith(("EXIT", "RET", "BRX")):
                    falls = not always
                    if falls:
                        self._add(after := f"after {address}")
                        self.graph.add_edge(block, after)
                        block = after

    def _add(self, block: str) -> None:
        self.graph.add_node(block)
        self.code[block] = []

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, one for each header."""
        reachable = self.graph.subgraph(nx.descendants(self.graph, "entry") | {"entry"}).copy()
        dominators = nx.immediate_dominators(reachable, "entry")
        found: dict[str, set[str]] = {}
        for tail, header in reachable.edges:
            if _dominates(dominators, header, tail):
                before = reachable.subgraph(set(reachable) - {header}).reverse(copy=False)
                body = {tail} | nx.descendants(before, tail) if tail != header else set()
                found.setdefault(header, {header}).update(body)
        return [Loop(header, frozenset(nodes)) for header, nodes in found.items()]

    def _acyclic(self, loop: Loop) -> nx.DiGraph:
        """The body of a loop without its back edges and those of loops inside; all ways out meet in `end`."""
        body = nx.DiGraph(self.graph.subgraph(loop.nodes))
        for inside in self.loops:
            if inside.nodes <= loop.nodes:
                body.remove_edges_from([(tail, inside.header) for tail in inside.nodes])
        body.add_edges_from([(node, "end") for node in loop.nodes if not body.out_degree(node)])
        return body

    def lengths(self, loop: Loop) -> tuple[int, int, int]:
        """Instructions of an iteration less optional parts; of a mask; of what a new span asks for, which loads."""
        body = self._acyclic(loop)
        after = nx.immediate_dominators(body.reverse(copy=False), "end")
        mask = span = 0
        for block, paths in [(block, list(body.successors(block))) for block in body]:
            if len(paths) != 2:
                continue
            lengths = [self._longest(body, path, after[block]) for path in paths]
            if abs(lengths[0] - lengths[1]) < LEAST:
                continue
            longer = paths[lengths.index(max(lengths))]
            region = (nx.descendants(body, longer) | {longer}) - nx.descendants(body, after[block]) - {after[block]}
            if any(map(MATRIX.match, self._opcodes(region))):
                continue
            if any(opcode.startswith("LDG") for opcode in self._opcodes(region)):
                span += max(lengths) - min(lengths)
            else:
                mask += max(lengths) - min(lengths)
        return self._longest(body, loop.header, None) - mask - span, mask, span

    def _longest(self, body: nx.DiGraph, start: str, stop: str | None, free: frozenset[str] = frozenset()) -> int:
        """Instructions on the longest way from `start` to before `stop`, or to the end; those of `free` cost none."""
        best: dict[str, int] = {}
        for node in reversed(list(nx.topological_sort(body))):
            if node in (stop, "end"):
                best[node] = 0
                continue
            ways = [best[successor] for successor in body.successors(node)]
            best[node] = (0 if node in free else len(self.code[node])) + max(ways, default=0)
        return best[start]

    def _opcodes(self, nodes: Iterable[str]) -> list[str]:
        return [opcode for node in nodes for opcode in self.code.get(node, ())]


@dataclass(frozen=True)
class Loop:
    """A natural loop: its header and all blocks of it."""

    header: str
    nodes: frozenset[str]


def _dominates(dominators: dict[str, str | None], header: str, node: str) -> bool:
    while node != header:
        above = dominators.get(node)
        if above is None or above == node:
            return False
        node = above
    return True
