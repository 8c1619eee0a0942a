"""Folders of PEFT adapters, as trainers save them: their base model, and loading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_packfree.errors import UnsupportedModel, in_short


def base_of_adapters(folder: str | Path) -> str | None:
    """Return the name of the base model of a folder of adapters, or None if the folder holds no
    adapters.

    Raises:
        UnsupportedModel: the folder does not name its base model.
    """
    path = Path(folder) / "adapter_config.json"
    if not path.is_file() or (Path(folder) / "config.json").is_file():
        return None
    try:
        name: Any = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
        if not isinstance(name, str) or not name:
            raise ValueError(f"base_model_name_or_path is {name!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(
            f"found {path} damaged ({in_short(error)}); wanted PEFT's, with the name of the model "
            "that the adapters are for; save them again, or write it there"
        ) from error
    return str(name)


def with_adapters(model: Any, folder: str | Path, *, weights: bool = True) -> Any:
    """Put the adapters of a folder on a model.

    Args:
        model: the adapters' base model.
        folder: as PEFT saves it.
        weights: whether to load the saved weights; otherwise PEFT initialises new ones.

    Raises:
        UnsupportedModel: PEFT cannot load the adapters, or is not installed.
    """
    try:
        from peft import PeftConfig, PeftModel, get_peft_model

        config = PeftConfig.from_pretrained(str(folder))
        # PEFT imports the module that `megatron_core` names, which may be a file in the current
        # folder
        if getattr(config, "megatron_config", None):
            raise ValueError("they name code to import, by megatron_config")
        if weights:
            return PeftModel.from_pretrained(model, str(folder), is_trainable=True)
        return get_peft_model(model, config)
    except Exception as error:
        # PEFT raises errors of many classes for bad fields
        raise UnsupportedModel(
            f"found adapters under {str(folder)!r} that cannot be put on their model "
            f"({in_short(error)}); wanted PEFT's, and PEFT "
            "itself; pip install peft, or check the folder"
        ) from error
