"""The Trainer callback, and the hooks that it uses during a training run."""

from hf_packfree.trainer.callback import PackFreeCallback

__all__ = ["PackFreeCallback"]
