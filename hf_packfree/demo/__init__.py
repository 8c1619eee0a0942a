"""Padded against packed training on real text, measured and drawn, with nothing to download."""

from hf_packfree.demo.results import DemoOptions, DemoReport, Progress, Training
from hf_packfree.demo.run import run_demo

__all__ = ["DemoOptions", "DemoReport", "Progress", "Training", "run_demo"]
