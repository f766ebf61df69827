"""What diffusers keeps in globals goes back after every test."""

from collections.abc import Iterator

import pytest
from diffusers.models.attention_dispatch import attention_backend


@pytest.fixture(autouse=True)
def same_attention_backend_afterwards() -> Iterator[None]:
    """`model.set_attention_backend` sets the process's active backend too, whose bits the next test may rely on."""
    with attention_backend("native"):
        yield
