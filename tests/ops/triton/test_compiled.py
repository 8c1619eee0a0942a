"""Every kernel compiles for an H100, where none is needed: the interpreter runs what Triton's
compiler refuses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.ops.triton.kernels import HOUSE, all_kernels


# compiles
@pytest.mark.slow
def test_every_kernel_compiles():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = sys.executable, "-m", "tests.ops.triton.compiled"
    done = subprocess.run(
        command, cwd=HOUSE.parent, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    failures = json.loads(done.stdout)
    assert failures == {name: [] for name in all_kernels()}
