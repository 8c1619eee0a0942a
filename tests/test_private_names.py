"""Private names of other packages: a new one fails until it is listed, one that moves fails here."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from tests import private_names
from tests.private_names import PRIVATE, touched


def test_every_private_name_that_is_touched_is_listed():
    found = touched()
    assert found.keys() == PRIVATE.keys(), {
        name: found.get(name) for name in found.keys() ^ PRIVATE.keys()
    }


def test_a_new_one_is_found():
    source = "from torch._inductor import config\nimport triton._C as c\nx._foo\ngetattr(x, '_bar')"
    names = set(private_names._names(source))
    assert names == {"torch._inductor", ".triton._C", "_foo", "_bar"}
    inner = "from flash_qla.utils.index import plan\nfrom flash_qla import rule\nimport fla.ops.kda"
    assert {*private_names._names(inner)} == {"flash_qla.utils.index.plan"}


def test_one_that_a_class_of_ours_has_for_something_else_is_found():
    """`Module._parameters`, where another class of ours has parameters of its own."""
    assert "_parameters" in {
        *private_names._members("class A:\n def f(self): self._parameters = 1")
    }
    assert "graphs/settings.py" in touched()["_parameters"]


def home_of(path: str):
    """Return the module, the class or the instance of that path, or None without the package."""
    parts = path.removesuffix("()").split(".")
    pytest.importorskip(parts[0])
    thing = import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(thing, part):
            import_module(".".join(parts[:number]))
        thing = getattr(thing, part)
    return thing() if path.endswith("()") else thing


@pytest.mark.parametrize("name", [name for name, one in PRIVATE.items() if one.home is not None])
def test_it_is_still_there(name):
    home = home_of(PRIVATE[name].home)
    if home is torch.nn.Module:
        home = home()
    assert hasattr(home, name.rpartition(".")[2])
