"""fp32 weights rounded to the half precision of autocast once for a row, instead of in every
product.

For training rows of a text model: what runs one knows when it begins, and that the weights are
where they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from hf_packfree.ops.in_use import listed
from hf_packfree.ops.launch import launch

# rows of a program of `round_changed`
_ROWS = 8
# elements that a program reads at once
_BLOCK = 1024
# elements of 16 bytes: rows that are multiples of it are read and written so many at once
_VECTOR = 8


class RoundedWeight:
    """The rounded copy of a weight W [F, D], once there is memory for it.

    The memory has room for LoRA's A below the copy and B beside it, so that [W; A] and [W, B] are
    made without copying W. As long as there is none, how much room products want is noted. A weight
    that was changed or moved since it was rounded is read as it is.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype
        self.memory: Tensor | None = None
        self._rows, self._columns = weight.shape
        self._seen: Any = None

    def read(self, weight: Tensor) -> Tensor:
        """Return the rounded weight [F, D], given the weight, or what stands for it."""
        if not self._is_current or (weight.requires_grad and torch.is_grad_enabled()):
            return weight.to(self.dtype)
        assert self.memory is not None
        return self.memory[: weight.shape[0], : weight.shape[1]]

    def beside(self, B: Tensor) -> Tensor | None:
        """Return [W, B], [F, D + K], given B [F, K]; None where there is no room for B."""
        (rows, width), K = self.weight.shape, B.shape[1]
        # rows that are no whole vectors would give all products with W other kernels
        found = None if K % _VECTOR else self._corner(rows, width + K)
        if found is not None:
            found[:, width:] = B
        return found

    def above(self, A: Tensor) -> Tensor | None:
        """Return [W; A], [F + K, D], given A [K, D]; None where there is no room for A."""
        rows, width = self.weight.shape
        found = self._corner(rows + A.shape[0], width)
        if found is not None:
            found[rows:] = A
        return found

    def _corner(self, rows: int, columns: int) -> Tensor | None:
        if self.memory is None:
            self._rows, self._columns = max(self._rows, rows), max(self._columns, columns)
        if self.memory is None or not self._is_current:
            return None
        fits = rows <= self.memory.shape[0] and columns <= self.memory.shape[1]
        return self.memory[:rows, :columns] if fits else None

    @property
    def nbytes(self) -> int:
        """Bytes of the copy with its room."""
        return self._rows * self._columns * self.dtype.itemsize

    @property
    def _is_current(self) -> bool:
        """Whether there is a copy, of a weight that is where `see` saw it, in the same version."""
        return self._seen == self._now and self.memory is not None

    @property
    def _now(self) -> Any:
        weight = self.weight
        return weight._version, weight.data_ptr(), weight.shape, weight.dtype

    def see(self) -> bool:
        """Note the weight's version; return whether it is a new one, of a frozen weight."""
        before, self._seen = self._seen, self._now
        return before != self._seen and not self.weight.requires_grad

    def empty(self) -> Tensor:
        """Return new memory for the copy, without values."""
        return self.weight.new_empty(self._rows, self._columns, dtype=self.dtype)


class RoundedWeights:
    """The rounded copies of a model's weights, as long as these keep their addresses.

    Args:
        weights: all of the model's, on one device. Those that are no contiguous fp32 matrices, or
            share their memory, are rounded where products read them.

    Attributes:
        refused: whether there was not enough memory for copies.
    """

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        self.refused = False
        known = [x for x in weights if _is_known(x)]
        at = Counter(x.data_ptr() for x in known)
        self._weights = {x.data_ptr(): x for x in known if at[x.data_ptr()] == 1}
        self._dtype: torch.dtype | None = None
        self._looked_for: dict[int, RoundedWeight] = {}
        self._made: list[RoundedWeight] = []
        self._kernels: _Kernels | None = None

    def in_use(self) -> AbstractContextManager[None]:
        """Let `copy_of` find these copies in the block, while a graph is captured."""
        return listed(self.of, _in_use)

    def in_row(self) -> AbstractContextManager[None]:
        """Let `copy_of` find these copies in the block, which runs a row without a graph, and
        wherever a backward pass runs layers again, up to `leave`.
        """
        self.leave()
        _recomputed.insert(0, ref(self))
        return listed(self.of_itself, _in_use)

    def leave(self) -> None:
        """Begin a row that reads no copies, nor does its recomputation."""
        _recomputed[:] = [each for each in _recomputed if each() not in (self, None)]

    def of_itself(self, weight: Tensor, dtype: torch.dtype) -> RoundedWeight | None:
        """As `of`, but None for what stands for a weight: where weights may have moved since the
        row began, others may be at their addresses.
        """
        found = self.of(weight, dtype)
        return found if found is not None and found.weight is weight else None

    def of(self, weight: Tensor, dtype: torch.dtype) -> RoundedWeight | None:
        """Return the copy of a weight, or of what stands for it at its address; it has no memory at
        first. None for other weights, and for another dtype than the first that was asked for.
        """
        address = weight.data_ptr()
        known = self._weights.get(address)
        if known is None or known.shape != weight.shape or not weight.is_contiguous():
            return None
        self._dtype = self._dtype or dtype
        if dtype != self._dtype:
            return None
        if address not in self._looked_for:
            self._looked_for[address] = RoundedWeight(known, dtype)
        return self._looked_for[address]

    def allocate(self, spare: float) -> None:
        """Make the copies of the weights that were looked for, if they leave the share `spare` of
        the GPU's memory; not during a capture.
        """
        every = [*self._looked_for.values()]
        new = [each for each in every if each.memory is None]
        if not new or self.refused or _is_capturing(new[0].weight):
            return
        self.refused = not _fits(new, spare)
        if self.refused:
            return
        memory = [each.empty() if each.memory is None else each.memory for each in every]
        kernels = _Kernels(every, memory)
        kernels.launch(every=True)
        # only now: a copy is read once it has memory, and an allocation may fail
        self._made, self._kernels = every, kernels
        for each, its in zip(every, memory, strict=True):
            each.memory = its
            each.see()

    def refresh(self) -> None:
        """Round what changed since the last time: trained weights always; frozen ones if torch
        counted a new version of any of them, or if an element has another value, one of each row
        and of each column, which finds weights that were written through `.data`, too.
        """
        if self._kernels is None:
            return
        self._kernels.launch(every=any([each.see() for each in self._made]))

    def __len__(self) -> int:
        return len(self._made)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(each.nbytes for each in self._made)


_in_use: list[Callable[[Tensor, torch.dtype], RoundedWeight | None]] = []
_recomputed: list[ReferenceType[RoundedWeights]] = []
"""Those that the last row of their model read, if it ran without a graph; the last row's first."""


def copy_of(weight: Tensor, dtype: torch.dtype) -> RoundedWeight | None:
    """Return the copy of a weight in `dtype` that is in use, or None."""
    finds = [*_in_use]
    for find in finds:
        if (found := find(weight, dtype)) is not None:
            return found
    # gradient checkpointing runs layers again within the backward pass
    again = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
    for each in [copies for one in [*_recomputed] if (copies := one()) is not None]:
        if (again or not finds) and (found := each.of_itself(weight, dtype)) is not None:
            if again:
                return found
            # layers that are called by themselves are recomputed by themselves
            each.leave()
    return None


def beside_rows() -> AbstractContextManager[None]:
    """Let `copy_of` find no copies in the block, which runs a model without gradients: those of a
    row whose backward pass is still to come stay.
    """
    return listed(lambda *_: None, _in_use)


class _Kernels:
    """The kernels' arguments: tables of all copies, [N, ...]."""

    def __init__(self, copies: Sequence[RoundedWeight], memory: Sequence[Tensor]) -> None:
        weights = [each.weight for each in copies]
        device, self._like = weights[0].device, memory[0]
        sizes = [(*x.shape, y.stride(0)) for x, y in zip(weights, memory, strict=True)]
        compared = [rows + width for rows, width, _ in sizes]
        self._weights = torch.tensor([x.data_ptr() for x in weights], device=device)
        self._copies = torch.tensor([x.data_ptr() for x in memory], device=device)
        self._sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self._always = torch.tensor(
            [x.requires_grad for x in weights], dtype=torch.int32, device=device
        )
        self._places = torch.tensor([0, *accumulate(compared[:-1])], device=device)
        self._seen = weights[0].new_zeros(sum(compared))
        self._changed = torch.zeros_like(self._always)
        self._blocks = -(-max(rows for rows, _, _ in sizes) // _ROWS)
        self._options = {
            "WIDTH": _VECTOR if all(width % _VECTOR == 0 for _, width, _ in sizes) else 1,
            "STRIDE": _VECTOR if all(stride % _VECTOR == 0 for _, _, stride in sizes) else 1,
            "ROWS": _ROWS,
            "BLOCK": _BLOCK,
            "num_warps": 4,
        }

    def launch(self, every: bool) -> None:
        """Round the weights that changed, or `every` one."""
        from hf_packfree.ops.fused.kernels.rounded import find_changed, round_changed

        count = len(self._weights)
        tables = self._weights, self._sizes
        launch(
            find_changed,
            (count,),
            *tables,
            self._always,
            self._places,
            self._seen,
            self._changed,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        if every:
            self._changed.fill_(1)
        grid, like = (self._blocks, count), self._like
        launch(round_changed, grid, *tables, self._copies, self._changed, like, **self._options)


def _is_known(x: Tensor) -> bool:
    dense = x.dtype == torch.float32 and x.ndim == 2 and x.is_contiguous() and x.numel() > 0
    # inference tensors have no versions, and what is offloaded to "meta" has no memory
    return dense and not (x.is_inference() or x.is_meta) and x.data_ptr() % 16 == 0


def _fits(copies: Sequence[RoundedWeight], spare: float) -> bool:
    if not copies[0].weight.is_cuda:
        return True
    free, total = torch.cuda.mem_get_info(copies[0].weight.device)
    return free - sum(each.nbytes for each in copies) >= spare * total


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
