"""A film decoded chunk by chunk on a GPU, with the VAE there or moved there and away by diffusers' offloading."""

import pytest
import torch
from torch import nn

from frame_gdn.decoding import stream_decoder

from ..helpers import NEEDS_GPU, relative_error
from ..test_decoding import in_chunks, in_one_call, latents_for, ltx2, wan

pytestmark = NEEDS_GPU


@pytest.fixture(params=[wan, ltx2], ids=["Wan", "LTX-2"])
def vae(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return request.param()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_equal_one_call(vae, dtype):
    latents = latents_for(vae, 7)
    exact = in_one_call(vae, latents)
    vae.to("cuda", dtype)
    latents = latents.cuda()
    error = relative_error(in_one_call(vae, latents.to(dtype)).cpu(), exact)
    frames = in_chunks(stream_decoder(vae), latents, [1, 3, 3])
    assert frames.dtype == dtype
    assert relative_error(frames.cpu(), exact) <= max(1.5 * error, 1e-5)


def test_a_vae_that_is_moved_away_between_chunks_goes_on(vae):
    accelerate = pytest.importorskip("accelerate")
    latents = latents_for(vae, 4)
    expected = in_one_call(vae, latents)
    _, hook = accelerate.cpu_offload_with_hook(vae, "cuda")
    decoder, frames = stream_decoder(vae), []
    for chunk in latents.cuda().split([2, 1, 1], dim=2):
        assert vae.device.type == "cpu"
        frames.append(decoder.decode(chunk))
        assert all(x.device.type == "cuda" for x in decoder.state.memory)
        hook.offload()
    assert relative_error(torch.cat(frames, dim=2).cpu(), expected) <= 1e-5


def test_a_state_that_is_moved_goes_on_elsewhere(vae):
    latents = latents_for(vae, 4)
    expected = in_one_call(vae, latents)
    decoder = stream_decoder(vae.cuda())
    first = decoder.decode(latents[:, :, :2].cuda())
    vae.cpu()
    with pytest.raises(ValueError, match="must be on one device"):
        decoder.decode(latents[:, :, 2:])
    decoder.state = decoder.state.to("cpu")
    frames = torch.cat([first.cpu(), decoder.decode(latents[:, :, 2:])], dim=2)
    assert relative_error(frames, expected) <= 1e-5
    with pytest.raises(ValueError, match="latents must be of the weights' dtype and device"):
        stream_decoder(vae).decode(latents.cuda())
