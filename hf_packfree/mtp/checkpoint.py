"""The head's tensors in a checkpoint: find them and their layout, read only them, write them in the
same layout.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import modeling_utils
from transformers.utils.hub import cached_file

from hf_packfree.errors import MissingHead, in_short

PREFIX = "mtp."
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_EXPERTS = re.compile(rf"({re.escape(PREFIX)}.*\.experts)\.(gate_up_proj|down_proj)")


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of a checkpoint whose names begin with `mtp.`.

    Attributes:
        checkpoint: folder or hub id, for messages.
        files: {name: the file that holds it}.
    """

    checkpoint: str
    files: dict[str, Path]

    @property
    def layers(self) -> int:
        """The number of layers in the tensors' names."""
        found = (re.match(r"mtp\.layers\.(\d+)\.", name) for name in self.files)
        # the number of different layer numbers, not the highest one, since a file may name any
        return len({match[1] for match in found if match})

    @property
    def per_expert(self) -> bool:
        """Whether every expert has tensors of its own, instead of one tensor for all experts."""
        return any(_EXPERT.fullmatch(name) for name in self.files)

    def read(self, shapes: Shapes) -> dict[str, Tensor]:
        """Return {name: tensor} of the head's parameters, named without the prefix, with all
        experts in one tensor.

        Args:
            shapes: {name: shape} of all parameters, named so.

        Raises:
            MissingHead: see `check`.
        """
        self.check(shapes)
        return {name: self._one(name, self._parts(name, shape)) for name, shape in shapes.items()}

    def check(self, shapes: Shapes) -> None:
        """Refuse an incomplete head, a head of other sizes, and tensors of unknown names, without
        reading values.

        Raises:
            MissingHead: lists these tensors.
        """
        if faults := self.faults(shapes):
            raise MissingHead(
                f"found {len(self.files)} tensors of a multi-token prediction head in "
                f"{self.checkpoint}, which {'; '.join(faults)}; wanted {len(self.wanted(shapes))}; "
                "name a checkpoint that holds the whole head, the base model's: "
                "mtp=MTPOptions(checkpoint=...), or start from random weights: "
                "mtp=MTPOptions(from_scratch=True)"
            )

    def faults(self, shapes: Shapes) -> list[str]:
        """Return why the tensors are not a head with parameters of these shapes, in half sentences;
        empty if they are.
        """
        wanted = self.wanted(shapes)
        missing, unknown = (
            sorted(wanted.keys() - self.files.keys()),
            sorted(self.files.keys() - wanted.keys()),
        )
        sizes = {name: self.shape(name) for name in sorted(wanted.keys() & self.files.keys())}
        unlike = [
            f"{name} {list(has)} instead of {list(wanted[name])}"
            for name, has in sizes.items()
            if has != wanted[name]
        ]
        lists = {"lacks": missing, "has besides": unknown, "has": unlike}
        return [f"{verb} {', '.join(names)}" for verb, names in lists.items() if names]

    def wanted(self, shapes: Shapes) -> Shapes:
        """Return {name: shape} of the tensors that hold parameters of these shapes in this
        checkpoint's layout.
        """
        found: Shapes = {}
        for name, shape in shapes.items():
            parts = self._parts(name, shape)
            # the shape of a single expert
            size = shape if parts == [PREFIX + name] else shape[1:]
            halves = size != shape and name.endswith("gate_up_proj")
            found |= dict.fromkeys(parts, (size[0] // 2, *size[1:]) if halves else size)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor; raises `MissingHead` for a damaged file."""
        with opened(self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as it is stored; raises `MissingHead` for a damaged file."""
        with opened(self.files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def _parts(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Return the names of the tensors that a parameter is made of."""
        match = _EXPERTS.fullmatch(PREFIX + name)
        return (
            [PREFIX + name]
            if match is None or not self.per_expert
            else _names_of_experts(match[1], match[2], shape[0])
        )

    def _one(self, name: str, parts: list[str]) -> Tensor:
        tensors = [self.tensor(part) for part in parts]
        if parts == [PREFIX + name]:
            return tensors[0]
        each = (
            [torch.cat(pair) for pair in zip(tensors[::2], tensors[1::2])]
            if name.endswith("gate_up_proj")
            else tensors
        )
        return torch.stack(each)


def _names_of_experts(where: str, kind: str, count: int) -> list[str]:
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return [f"{where}.{number}.{part}.weight" for number in range(count) for part in parts]


def save_as_read(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a model by its class's `save_pretrained`, with the head's experts in the layout of the
    checkpoint they were read from.
    """
    with _experts_written(apart=model.mtp.per_expert):
        return type(model).save_pretrained(model, *args, **kwargs)


@contextmanager
def _experts_written(*, apart: bool) -> Iterator[None]:
    """Keep transformers, in the block, from writing the head's experts in the layout of the text
    model's experts.
    """
    library: Any = modeling_utils
    # the one function of transformers that gets all tensors before files are written
    others = library.revert_weight_conversion

    def revert(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        ours = {name: part for name, part in tensors.items() if _EXPERTS.fullmatch(name)}
        rest: dict[str, Tensor] = others(
            model, {name: part for name, part in tensors.items() if name not in ours}
        )
        return rest | (_apart(ours) if apart else ours)

    library.revert_weight_conversion = revert
    try:
        yield
    finally:
        library.revert_weight_conversion = others


def _apart(experts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split the tensors that `HeadTensors.read` joined into tensors per expert again."""
    found: dict[str, Tensor] = {}
    for name, whole in experts.items():
        where, _, kind = name.rpartition(".")
        parts = [
            half
            for one in whole.unbind()
            for half in (one.chunk(2) if kind == "gate_up_proj" else [one])
        ]
        found |= zip(_names_of_experts(where, kind, len(whole)), (part.clone() for part in parts))
    return found


def head_tensors(checkpoint: str | os.PathLike[str]) -> HeadTensors:
    """As `find_head_tensors`, of the checkpoint that a model came from.

    Raises:
        MissingHead: the checkpoint has no safetensors, or damaged ones.
    """
    found = find_head_tensors(checkpoint)
    if found is None:
        raise MissingHead(
            f"found neither {SINGLE} nor {INDEX} in "
            f"{checkpoint or 'no checkpoint: the model came from none'}; wanted the checkpoint "
            "that the model came from, to read the multi-token prediction head; name one: "
            "mtp=MTPOptions(checkpoint=...), or start from random weights: "
            "mtp=MTPOptions(from_scratch=True)"
        )
    return found


def find_head_tensors(checkpoint: str | os.PathLike[str]) -> HeadTensors | None:
    """Return the head's tensors in a checkpoint, maybe none; None where it has no safetensors.
    Reads only names, of the files from which transformers reads the model: the single file if there
    is one, else the files of the index.

    Args:
        checkpoint: a folder, or a hub id, whose files are downloaded as transformers does.

    Raises:
        MissingHead: the safetensors are damaged.
    """
    checkpoint = str(checkpoint)
    single = file_of(checkpoint, SINGLE)
    if single is not None:
        with opened(single) as file:
            return HeadTensors(
                checkpoint, {name: single for name in file.keys() if name.startswith(PREFIX)}
            )
    index = file_of(checkpoint, INDEX)
    if index is None:
        return None
    parts: dict[str, str] = read_index(index)["weight_map"]
    wanted = {name: part for name, part in parts.items() if name.startswith(PREFIX)}
    files = {part: file_of(checkpoint, part) for part in set(wanted.values())}
    if gone := sorted(part for part, path in files.items() if path is None):
        raise MissingHead(
            f"found an index in {checkpoint} that names {', '.join(gone)}, which is not there; "
            "wanted every file of the index; download the checkpoint again"
        )
    return HeadTensors(
        checkpoint,
        {name: path for name, part in wanted.items() if (path := files[part]) is not None},
    )


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        MissingHead: the file is damaged, or lacks a tensor that the index names.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise _damaged(path, error) from error


def read_index(path: Path) -> dict[str, Any]:
    """Return a checkpoint's index, checked to name only files inside its folder.

    Raises:
        MissingHead: the index is damaged, or names other files.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        parts, sizes = found["weight_map"], found.setdefault("metadata", {})
        _refuse_unless(isinstance(parts, dict), "weight_map is no table")
        _refuse_unless(isinstance(sizes, dict), "metadata is no table")
        size = sizes.setdefault("total_size", 0)
        _refuse_unless(isinstance(size, (int, float)), f"total_size is {size!r}")
        for part in {str(part): part for part in parts.values()}.values():
            _refuse_unless(_stays_inside(part), f"it names {part!r}, no file of its folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    return found


def _refuse_unless(holds: bool, fault: str) -> None:
    if not holds:
        raise TypeError(fault)


def _stays_inside(part: Any) -> bool:
    """Whether a file name in an index leads to no other folder; the file itself may be a link, as
    in the hub's cache.
    """
    return (
        isinstance(part, str)
        and bool(part)
        and not Path(part).is_absolute()
        and ".." not in Path(part).parts
    )


def _damaged(path: Path, error: Exception) -> MissingHead:
    return MissingHead(
        f"found {path} damaged ({in_short(error)}); wanted safetensors whole, with the tensors "
        "that their index names; download the checkpoint again"
    )


def file_of(checkpoint: str, name: str) -> Path | None:
    """Return the path of a checkpoint's file, downloaded where the checkpoint is a hub id, or
    None.
    """
    if not checkpoint:
        return None
    if Path(checkpoint).is_dir():
        path = Path(checkpoint, name)
        return path if path.is_file() else None
    try:
        found = cached_file(checkpoint, name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if found is None else Path(found)
