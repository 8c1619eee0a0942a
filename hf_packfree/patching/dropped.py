"""A warning for a checkpoint with a vision tower that is loaded by a class without one:
transformers drops the tower silently.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn
from transformers.utils.hub import cached_file

from hf_packfree.patching.announce import warn_once
from hf_packfree.patching.family import Family


def warn_of_dropped_tower(model: nn.Module, family: Family) -> None:
    """Warn, once per process and checkpoint, if the checkpoint that a model was read from has a
    vision tower and the model has none.
    """
    towers = {name for tower in family.towers for name in (tower.cls, tower.attention)}
    source = str(getattr(getattr(model, "config", None), "name_or_path", None) or "")
    if not source or any(type(module).__name__ in towers for module in model.modules()):
        return
    if "vision_config" not in _config_of(source):
        return
    warn_once(
        f"found a {type(model).__name__} of {source!r}, whose config has a vision tower that this "
        "class lacks: it takes no images, and save_pretrained writes a checkpoint without the "
        "tower, of another architecture; wanted the whole model; load it by "
        "AutoModelForImageTextToText, unless the text model alone is what you want"
    )


def _config_of(source: str) -> dict[str, object]:
    """Return a checkpoint's config from disk, or an empty dict; nothing is downloaded."""
    path = Path(source) / "config.json"
    try:
        if not path.is_file():
            path = Path(cached_file(source, "config.json", local_files_only=True) or "")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
