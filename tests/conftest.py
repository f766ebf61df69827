"""What every test stands on: one thread, one seed, no network, and Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

# Read by triton when a kernel is decorated, so it is set before any test module imports one; spawned ranks inherit it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Read by huggingface_hub at import: a test that reached for a hub would fail on a machine without one, so all do.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tests run on two workers, and several ranks may share a core.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
