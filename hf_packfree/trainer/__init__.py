"""The Trainer callback, and what it does during a training run."""

from hf_packfree.trainer.callback import PackFreeCallback

__all__ = ["PackFreeCallback"]
