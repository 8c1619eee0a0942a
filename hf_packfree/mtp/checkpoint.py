"""The head's tensors in a checkpoint: which there are, in which layout, and reading those alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from hf_packfree.errors import MissingHead

PREFIX = "mtp."
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


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
        """The number of layers that the names speak of."""
        found = (re.match(r"mtp\.layers\.(\d+)\.", name) for name in self.files)
        return max((int(match[1]) + 1 for match in found if match), default=0)

    @property
    def per_expert(self) -> bool:
        """Whether every expert has tensors of its own, instead of one for all."""
        return any(_EXPERT.fullmatch(name) for name in self.files)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the head's parameters by their names without prefix, experts in one tensor each.

        Args:
            names: of all parameters, so written.

        Raises:
            MissingHead: some are not there, or others are.
        """
        return {name: self._one(name, parts) for name, parts in self.sources(names).items()}

    def sources(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return {parameter: the tensors that it is made of}; see `read`, which takes and raises the same."""
        sources = {name: self._sources(PREFIX + name) for name in names}
        wanted = {part for parts in sources.values() for part in parts}
        missing, unknown = sorted(wanted - self.files.keys()), sorted(self.files.keys() - wanted)
        if missing or unknown:
            lacks = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)} besides"
            raise MissingHead(
                f"found {len(self.files)} tensors of a multi-token prediction head in {self.checkpoint}, which {lacks}; wanted "
                f"{len(wanted)}; name a checkpoint that holds the whole head, such as the base model's: "
                "mtp=MTPOptions(checkpoint=...), or start from random weights: mtp=MTPOptions(from_scratch=True)"
            )
        return sources

    def _sources(self, name: str) -> list[str]:
        """Return the names of the tensors that a parameter is made of."""
        experts, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj") or not experts.endswith(".experts") or not self.per_expert:
            return [name]
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        numbers = {int(match[2]) for file in self.files if (match := _EXPERT.fullmatch(file)) and match[1] == experts}
        return [f"{experts}.{number}.{part}.weight" for number in range(max(numbers, default=0) + 1) for part in parts]

    def _one(self, name: str, parts: list[str]) -> Tensor:
        tensors = [self._tensor(part) for part in parts]
        if parts == [PREFIX + name]:
            return tensors[0]
        each = [torch.cat(pair) for pair in zip(tensors[::2], tensors[1::2])] if name.endswith("gate_up_proj") else tensors
        return torch.stack(each)

    def _tensor(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


def head_tensors(checkpoint: str) -> HeadTensors:
    """Return what a checkpoint holds of the head, maybe nothing; reads its index alone, or the header of its only file.

    Args:
        checkpoint: a folder, or a hub id, whose files are downloaded as transformers does.

    Raises:
        MissingHead: it holds no safetensors.
    """
    index = _file(checkpoint, _INDEX)
    if index is not None:
        parts: dict[str, str] = json.loads(index.read_text())["weight_map"]
        wanted = {name: part for name, part in parts.items() if name.startswith(PREFIX)}
        files = {part: _file(checkpoint, part) for part in set(wanted.values())}
        if gone := sorted(part for part, file in files.items() if file is None):
            raise MissingHead(
                f"found an index in {checkpoint} that names {', '.join(gone)}, which is not there; wanted every file of the "
                "index; download the checkpoint again"
            )
        return HeadTensors(checkpoint, {name: file for name, part in wanted.items() if (file := files[part]) is not None})
    single = _file(checkpoint, _SINGLE)
    if single is None:
        raise MissingHead(
            f"found neither {_INDEX} nor {_SINGLE} in {checkpoint or 'no checkpoint: the model came from none'}; wanted the "
            "checkpoint that the model came from, to read the multi-token prediction head; name one: "
            "mtp=MTPOptions(checkpoint=...), or start from random weights: mtp=MTPOptions(from_scratch=True)"
        )
    with safe_open(single, framework="pt") as file:
        return HeadTensors(checkpoint, {name: single for name in file.keys() if name.startswith(PREFIX)})


def _file(checkpoint: str, name: str) -> Path | None:
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
