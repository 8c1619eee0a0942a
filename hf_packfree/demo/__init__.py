"""The main job on real text, with nothing to download: padded against packed training, measured and drawn."""

from hf_packfree.demo.report import DemoError, DemoOptions, DemoReport, Progress, Stage
from hf_packfree.demo.run import run_demo

__all__ = ["DemoError", "DemoOptions", "DemoReport", "Progress", "Stage", "run_demo"]
