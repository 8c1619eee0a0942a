"""What the tests measure with: NaN is never small."""

from __future__ import annotations

import math

import torch

from tests.integrations.compare import overall
from tests.integrations.compare import worst as worst_of_steps
from tests.support import difference, errors, relative_rms, worst_gradient
from tests.test_trainer import worst


def test_nan_in_one_of_several_gradients_is_infinite():
    """Python's `max` drops a NaN that does not come first."""
    wanted = {name: torch.ones(3) for name in "abcd"}
    found = wanted | {"c": torch.tensor([1.0, math.nan, 1.0])}
    assert relative_rms(found["c"], wanted["c"]) == difference(found["c"], wanted["c"]) == math.inf
    assert max(difference(found[name], one) for name, one in wanted.items()) == math.inf
    assert errors(([torch.ones(2)], found), ([torch.ones(2)], wanted)) == (0.0, math.inf)
    assert worst(found, wanted) == worst_gradient(found, wanted) == math.inf
    assert (
        worst_of_steps([wanted, found], [wanted, wanted])
        == overall([wanted, found], [wanted, wanted])
        == math.inf
    )
