"""A model from a config, a folder, a hub id, or the name of a built-in tiny one."""

from __future__ import annotations

from contextlib import nullcontext
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_packfree.errors import PackFreeError, UnsupportedModel, in_short
from hf_packfree.patching.registry import FAMILIES
from hf_packfree.patching.shrunk import shrunk
from hf_packfree.verify.adapters import base_of_adapters, with_adapters


def build_model(
    source: str | Path | transformers.PretrainedConfig,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Return the model that `source` names, unpatched.

    Args:
        source: a family's name, of ours or transformers' ("qwen3_5", "bloom": a tiny model with
            random weights), a config (random weights), a `config.json` or a folder that holds one
            without weights (random weights), or a checkpoint folder or hub id (its weights).
        device: where to put the parameters (default: the CPU); random weights are drawn there.
        dtype: of the parameters (default: the checkpoint's or config's own).
        trust_remote_code: run code that comes with a hub id or folder.

    Returns:
        The class that the checkpoint was saved from, else the family's language model; in
        evaluation mode if it has weights of its own, as `from_pretrained` leaves it.

    Raises:
        UnsupportedModel: there is no model of that name, transformers has no language model for the
            config, or the checkpoint's files do not fit together.
        ImportError: the checkpoint needs a package that is not installed.
    """
    if isinstance(source, (str, Path)) and (base := base_of_adapters(source)) is not None:
        model = build_model(base, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        adapted: nn.Module = with_adapters(model, source)
        return adapted
    tiny = {family.name: family for family in FAMILIES}
    try:
        if isinstance(source, str) and not Path(source).exists():
            if source in tiny:
                source = tiny[source].tiny_config()
            elif source in transformers.CONFIG_MAPPING:
                source = _tiny_of_type(source)
        if isinstance(source, (str, Path)):
            model = _from_name(source, device, dtype, trust_remote_code)
        else:
            model = _from_config(source, device, dtype, trust_remote_code)
        return model.to(device) if device is not None else model
    except (PackFreeError, ImportError):
        raise
    except Exception as error:
        # loaders raise whatever a damaged file makes them raise
        what = (
            repr(str(source)) if isinstance(source, (str, Path)) else f"a {type(source).__name__}"
        )
        raise UnsupportedModel(
            f"found {what}, of which no model can be built ({in_short(error)}); wanted a config "
            "whose sizes fit together, and "
            "weights of the same sizes; mend the config, or download the checkpoint again"
        ) from error


def _tiny_of_type(name: str) -> transformers.PretrainedConfig:
    """Return the configuration of a small model of one of transformers' types."""
    config = transformers.CONFIG_MAPPING[name]().get_text_config(decoder=True)
    small: transformers.PretrainedConfig = type(config)(**shrunk(config, longest=4096))
    return small


def _from_name(
    source: str | Path,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
) -> nn.Module:
    path = Path(source)
    refuse_missing_path(source)
    try:
        config = transformers.AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
        if path.exists() and not _has_weights(path):
            return _from_config(config, device, dtype, trust_remote_code)
        loader: Any = _class_for(config)
        model: nn.Module = loader.from_pretrained(
            source, dtype=dtype or "auto", trust_remote_code=trust_remote_code
        )
        return model
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"found no model under {str(source)!r} ({in_short(error)}); wanted a checkpoint "
            f"folder, a config, a hub id, or a name that packfree models lists{meant(source)}; "
            f"check the name, and that the hub can be reached{trusted(error)}"
        ) from error


def trusted(error: Exception) -> str:
    """Return what to do about code that transformers did not run, or ""."""
    if "trust_remote_code" not in str(error):
        return ""
    return (
        "; if you trust its code, packfree verify --trust-remote-code, or trust_remote_code=True, "
        "runs it"
    )


def meant(name: str | Path) -> str:
    """Return " (did you mean ...?)" with the nearest name of a family, or ""."""
    near = get_close_matches(str(name), [family.name for family in FAMILIES], n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def refuse_missing_path(name: str | Path) -> None:
    """Refuse a name that can only be a path, where there is no such path: the hub would complain of
    its letters instead.

    Raises:
        UnsupportedModel: there is no such path.
    """
    text = str(name)
    is_path = isinstance(name, Path) or text.startswith(("/", ".", "~")) or text.count("/") > 1
    if is_path and not Path(name).exists():
        raise UnsupportedModel(
            f"found no file or folder {text!r}; wanted a checkpoint folder, a config, a hub id, or "
            "a name that packfree models lists; check the path"
        )


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors*")) or any(path.glob("*.bin*"))


def _from_config(
    config: transformers.PretrainedConfig,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
) -> nn.Module:
    """Build a model with random weights, drawn on `device`: on the CPU billions of random numbers
    take minutes.
    """
    loader: Any = _class_for(config)
    given: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if issubclass(loader, nn.Module):
        build = loader._from_config
    else:
        build = partial(loader.from_config, trust_remote_code=trust_remote_code)
    with nullcontext() if device is None else torch.device(device):
        model: nn.Module = build(config, **given)
    return model


def _class_for(config: transformers.PretrainedConfig) -> Any:
    """The class the checkpoint was saved from, else the family's language model, else the Auto
    class that finds it in code that comes with the checkpoint.
    """
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    # a config with a text model inside is in both mappings, but only the second one's class takes
    # the whole config
    autos: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    for auto in autos[::-1] if hasattr(config, "text_config") else autos:
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    own = getattr(config, "auto_map", None) or {}
    if (found := next((auto for auto in autos if auto.__name__ in own), None)) is not None:
        return found
    raise UnsupportedModel(
        f"found a {type(config).__name__}, for which transformers has no language model; wanted "
        "the config of a family that packfree models lists; pass one"
    )
