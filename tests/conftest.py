"""For every test: one thread, no deadline, transformers' deprecations are errors, fake kernels
are seen.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.deprecations import DeprecationsAreErrors

# modules and tests stay to the end: nothing of them is garbage, and to look for it is a fifth of
# collecting
gc.disable()

# which is read on import; without a network, looking for one takes half a minute
os.environ["HF_HUB_OFFLINE"] = "1"
# tiny models gain nothing from more threads, and workers that share cores lose a lot, as do the
# processes that they start
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"

# without a GPU the Triton kernels run in Triton's interpreter, which has to be chosen before
# anything imports triton
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # and oneDNN leaves AMX alone, with which it reads bf16 rows beyond the columns of their product:
    # there are spare columns, which the kernels' tests fill with NaN
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# machines are shared and noisy: no test fails for being slow; every run draws other examples
settings.register_profile(
    "packfree", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("packfree")

logging.getLogger("transformers").addHandler(DeprecationsAreErrors())


@pytest.fixture
def widened(monkeypatch):
    """In fp64 what transformers computes in fp32 whatever the weights: see `widen`."""
    from tests.support import widen

    widen(monkeypatch)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def lfm3_convolves_in_torch(monkeypatch):
    """Where causal-conv1d is installed, transformers' own LFM3 calls it, which has no 7 taps."""
    if find_spec("transformers.models.lfm3"):
        upstream = import_module("transformers.models.lfm3.modeling_lfm3")
        plain = inspect.unwrap(upstream.causal_conv1d_fn)
        monkeypatch.setattr(upstream, "causal_conv1d_fn", plain)


# tests/fakes is on the path only where the runner puts it (tests/compat/run.py)
if find_spec("fake_kernels"):
    import_module("fake_kernels").show_to_transformers()


def pytest_collection_finish() -> None:
    """Look for garbage from here on, as every `Trainer.train()` does, but not among what was
    collected.
    """
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the end of the process find everything; libraries complain of what is left."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give a file's tests to one process: what a module's fixtures start, and what its caches
    keep, is there once. Where --dist says otherwise, so be it.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences of the command line stay on one line, but where a test says how wide it is."""
    monkeypatch.setenv("COLUMNS", "500")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes and runs under -m fuzz alone; other tests keep their own
    expressions.
    """
    long = [item for item in items if item.get_closest_marker("fuzz")]
    if long and "fuzz" not in config.option.markexpr:
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


@pytest.fixture(autouse=True, scope="session")
def frames_are_numbered() -> Iterator[None]:
    """Let transformers 5.3's own models number videos whose frames have text between them, which
    they cannot without this.

    Every other release makes one grid of each frame itself; ours are handed over so
    (`tests/models/test_rope_index.py`).
    """
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        if transformers.__version__.startswith("5.3."):
            from tests.vision import number_frames

            number_frames(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def gradients_are_divided_once() -> Iterator[None]:
    """Let the Trainer of transformers 5.2 to 5.4 divide gradients by a step's micro-batches once:
    it does twice, of any model.

    What its users can do, and are advised to (`tests/test_trainer.py`).
    """
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        if transformers.__version__.startswith(("5.2.", "5.3.", "5.4.")):
            make = transformers.Trainer.create_accelerator_and_postprocess

            def make_and_set(trainer: transformers.Trainer) -> None:
                make(trainer)
                trainer.accelerator.gradient_accumulation_steps = 1

            patch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", make_and_set)
        yield


_tried: dict[tuple[str, str | None], object] = {}


@pytest.fixture
def imports_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the doctor try a package once per test process, if this one has not imported it; again
    where another file has its name.
    """
    from hf_packfree.doctor import Import, probe

    def remembered(modules: Sequence[str]) -> dict[str, object]:
        tops = {name: name.partition(".")[0] for name in modules}
        # on the path, where a stand-in may be in front of what this process has imported
        specs = {name: PathFinder.find_spec(top) for name, top in tops.items()}
        places = {name: (name, spec and spec.origin) for name, spec in specs.items()}
        for name, place in places.items():
            top = sys.modules.get(tops[name])
            if name in sys.modules and getattr(top, "__file__", None) == place[1]:
                _tried[place] = Import(getattr(top, "__version__", None), None)
        new = [name for name, place in places.items() if place not in _tried]
        _tried.update({places[name]: found for name, found in probe(new).items()})
        return {name: _tried[place] for name, place in places.items()}

    monkeypatch.setattr("hf_packfree.doctor.packages.probe", remembered)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages of tests/fakes, in front of real ones if there are any; gone afterwards."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] in ("fla", "causal_conv1d")]

    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(Path(__file__).parent / "fakes")
    yield
    for name in loaded():
        del sys.modules[name]
