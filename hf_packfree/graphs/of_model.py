"""The graphs of all text models of one model."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from hf_packfree.graphs.copies import Copies
from hf_packfree.graphs.runner import Runner
from hf_packfree.packing import PackedSequence


class Graphs:
    """The graphs, and the rounded copies of weights, of every text model that one call of
    `apply_patches` patched; a copy of this object has none.

    Attributes:
        wait: whether no graph is captured at present, nor copies made for rows without a graph,
            because the optimizer has yet to allocate its states: their memory is counted after
            that. Graphs that are there are replayed.
    """

    def __init__(self) -> None:
        self.wait = False
        self._runners: weakref.WeakKeyDictionary[nn.Module, Runner] = weakref.WeakKeyDictionary()
        self._copies: weakref.WeakKeyDictionary[nn.Module, Copies] = weakref.WeakKeyDictionary()

    def of(self, trunk: nn.Module) -> Runner:
        """Return the text model's runner."""
        if trunk not in self._runners:
            self._runners[trunk] = Runner(weakref.ref(trunk), self._copies_of(trunk))
        return self._runners[trunk]

    def _copies_of(self, trunk: nn.Module) -> Copies:
        if trunk not in self._copies:
            self._copies[trunk] = Copies(trunk)
        return self._copies[trunk]

    def rounded_once(self, trunk: nn.Module) -> AbstractContextManager[None]:
        """Let products of the block, which runs a training row without a graph, and those of its
        recomputation read each fp32 weight rounded once, if nothing is in the way.
        """
        copies, found = self._copies_of(trunk), None
        captures = self._runners[trunk].captures if trunk in self._runners else None
        # what a graph's backward pass is still to read stays as it is
        if captures is None or not captures.are_read():
            found = copies.in_row(self.wait, keep=bool(captures and captures.graphs))
        if found is None:
            self.round_each(trunk)
        return found or nullcontext()

    def round_each(self, trunk: nn.Module) -> None:
        """Let the products of a row that runs now, and those of its recomputation, round each fp32
        weight that they read.
        """
        if trunk in self._copies:
            self._copies[trunk].rounded.leave()

    def look(self) -> None:
        """See `Runner.look`."""
        for runner in self._runners.values():
            runner.look()

    def looked_for(self, packed: PackedSequence) -> None:
        """See `Runner.looked_for`."""
        for runner in self._runners.values():
            runner.looked_for(packed)

    def leave(self) -> None:
        """See `Runner.leave`."""
        for runner in self._runners.values():
            runner.leave()

    def of_one(self) -> Runner | None:
        """Return the only text model's runner; None if rows of several were run, or of none."""
        runners = [*self._runners.values()]
        return runners[0] if len(runners) == 1 else None

    @property
    def replayed(self) -> int:
        """How many rows were replayed."""
        return sum(runner.replayed for runner in self._runners.values())

    def in_words(self) -> str:
        """Return in words how many rows ran in graphs, and why others did not."""
        runners = list(self._runners.values())
        reasons = sum((runner.reasons for runner in runners), Counter[str]())
        lengths = sorted({key[0].tokens for runner in runners for key in runner.captures.graphs})
        said = f"{self.replayed} rows were replayed"
        ahead = sum(runner.ahead.taken for runner in runners)
        said += f", {ahead} of them launched before their boundaries were read" if ahead else ""
        longer = sum(runner.replayed_in_longer for runner in runners)
        said += f", {longer} in graphs of longer rows" if longer else ""
        said += f" (of up to {', '.join(map(str, lengths))} tokens)" if lengths else ""
        copies = self.copies_in_words("before each")
        said += f"; {copies}" if copies and self.replayed else ""
        why = ", ".join(f"{count} because {reason}" for reason, count in reasons.most_common())
        return f"CUDA graphs: {said}" + (f"; without: {why}" if why else "")

    def copies_in_words(self, when: str) -> str:
        """Return in words that fp32 weights were rounded once for all products, `when` that was,
        and what memory it costs; or that there was none for it. Empty if there are no copies.
        """
        every = [copies.rounded for copies in self._copies.values()]
        if any(each.refused for each in every):
            return "fp32 weights were rounded in every product, for lack of memory for copies"
        mib = sum(each.nbytes for each in every) / 2**20
        return f"fp32 weights were rounded {when}, in copies of {mib:,.0f} MiB" if mib else ""

    def __deepcopy__(self, memo: Any) -> Graphs:
        return Graphs()

    def __reduce__(self) -> Any:
        return Graphs, ()
