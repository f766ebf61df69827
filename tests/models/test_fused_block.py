"""A VideoDiT on the fused functions against the plain ones, and its layers where an adapter stands around them."""

import pytest
import torch
from torch import Tensor

from tests.helpers import relative_error
from tests.kernels.test_steps import DEVICE
from tests.models.helpers import gradients, tiny_inputs, tiny_model, weighted_sum


def output_and_gradients(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    model = tiny_model(dtype, chunk_frames=2, num_layers=2).to(DEVICE)
    model.set_backend(backend)
    inputs = {name: t.to(DEVICE) for name, t in tiny_inputs(3, dtype, batch=1).items()}
    sample = model(**inputs).sample
    weighted_sum(sample.cpu()).backward()
    return {"sample": sample.detach(), **gradients(model)}


def test_the_fused_functions_are_as_exact_as_the_plain_ones():
    pytest.importorskip("triton")
    exact = output_and_gradients(torch.float64, "torch")
    plain, fused = (output_and_gradients(torch.float32, backend) for backend in ("torch", "triton"))

    def error(found: dict[str, Tensor]) -> float:
        return sum(relative_error(found[name], x) ** 2 for name, x in exact.items()) ** 0.5

    assert error(fused) <= 2 * error(plain)


def test_a_backend_that_is_not_known_is_a_value_error():
    with pytest.raises(ValueError, match="backend must be one of .* got 'cuda'"):
        tiny_model().set_backend("cuda")


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd")
@pytest.mark.parametrize("layer", ["conv_inverted", "conv_depth", "conv_point", "taps", "patch_embedding"])
def test_an_adapter_that_adds_nothing_yet_changes_nothing(layer):
    peft = pytest.importorskip("peft")
    model, inputs = tiny_model(), tiny_inputs(3)
    expected = model(**inputs).sample
    # Grouped convolutions want a rank that their groups divide.
    rank = 84 if layer == "conv_depth" else 2
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, target_modules=[layer]), model)
    assert any("lora" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(model.double()(**inputs).sample, expected, rtol=0, atol=1e-12)
