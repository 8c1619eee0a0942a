"""TRL's AsyncGRPOTrainer, which packs samples as trees, on models with linear layers.

TRL loads the model in the trainer's constructor, for its own attention kernels, and refuses models
with layers that are not attention. In a patched model all layers follow trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from hf_packfree.errors import PatchConflict
from hf_packfree.patching import patch_report, register_patches

_TRAINER = "trl.experimental.async_grpo.async_grpo_trainer"
_LOADS = "create_model_from_path"
"""The function that the constructor calls to load the model."""
_GOES_ON = "add_fused_lm_head"
"""The first function that the constructor calls after its check of the layers."""


@contextmanager
def patched_for_async_grpo(**options: Any) -> Iterator[None]:
    """Patch the models that `AsyncGRPOTrainer` loads in the block, and let its check accept them:

        with patched_for_async_grpo():
            trainer = AsyncGRPOTrainer(model="Qwen/Qwen3.5-2B", ...)
        trainer.train()

    A model of no supported family is loaded as TRL does.

    Args:
        options: of `hf_packfree.register_patches`.

    Raises:
        PatchConflict: TRL's constructor differs from that of release 1.16; or see
            `register_patches`.
    """
    trainer: Any = import_module(_TRAINER)
    missing = [name for name in (_LOADS, _GOES_ON) if not hasattr(trainer, name)]
    if missing:
        raise PatchConflict(
            f"found no {missing[0]} in {_TRAINER}; wanted TRL 1.16, whose constructor loads models "
            "by it; install that release, or report this"
        )
    load, go_on = getattr(trainer, _LOADS), getattr(trainer, _GOES_ON)
    with ExitStack() as shown:

        def load_patched(*args: Any, **kwargs: Any) -> Any:
            model = load(*args, **{**kwargs, "attn_implementation": "sdpa"})
            if not patch_report(model).patched:
                return load(*args, **kwargs)
            config = model.config.get_text_config()
            kinds = ["full_attention"] * config.num_hidden_layers
            shown.enter_context(_meanwhile(config, {"layer_types": kinds}))
            return model

        def show(*args: Any, **kwargs: Any) -> Any:
            shown.close()
            return go_on(*args, **kwargs)

        changed = {_LOADS: load_patched, _GOES_ON: show}
        with register_patches(**options), _meanwhile(trainer, changed):
            yield


@contextmanager
def _meanwhile(thing: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of an object to other values for the block."""
    before = {name: vars(thing)[name] for name in values}
    vars(thing).update(values)
    try:
        yield
    finally:
        vars(thing).update(before)
