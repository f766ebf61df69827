"""What every test stands on: one thread, one seed, no network, and Triton's interpreter where there is no GPU."""

import os
from typing import Any

import pytest
import torch

# Read by triton when a kernel is decorated, so it is set before any test module imports one; spawned ranks inherit it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    @pytest.fixture(autouse=True, scope="session")
    def interpreter_that_rounds() -> None:
        """A GPU rounds to the nearest bfloat16, Triton's interpreter cuts off: twice the error, and slowly."""
        try:
            import numpy as np
            import triton.language as tl
            from triton.runtime import interpreter
        except ImportError:
            return
        convert = interpreter._convert_float

        def rounding(x: Any, source: Any, target: Any, mode: Any) -> Any:
            if (source, target) == (tl.float32, tl.bfloat16):
                rounded = torch.from_numpy(np.ascontiguousarray(x).view(np.float32).copy()).bfloat16()
                return rounded.view(torch.int16).numpy().view(np.uint16).reshape(x.shape)
            if (source, target) == (tl.bfloat16, tl.float32):
                return np.ascontiguousarray(x).view(np.uint16).astype(np.uint32) << 16
            return convert(x, source, target, mode)

        interpreter._convert_float = rounding


# Read by huggingface_hub at import: a test that reached for a hub would fail on a machine without one, so all do.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tests run on two workers, and several ranks may share a core.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write what long tests saw to tests/results/")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
