"""A film decoded chunk by chunk is the film decoded in one call, whatever the cuts, the branches and the VAE's own
ways to save memory."""

import warnings

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers import (
    AutoencoderDC,
    AutoencoderKLCogVideoX,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    AutoencoderKLWan,
)
from torch import Tensor, nn

from frame_gdn.decoding import (
    DecoderState,
    StreamDecoder,
    denormalize_latents,
    normalize_latents,
    stream_decoder,
)
from tests.helpers import fill_randomly, relative_error

WAN: dict[str, object] = {
    "base_dim": 3,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "latents_mean": [0.1] * 4,
    "latents_std": [2.0] * 4,
}
LTX2: dict[str, object] = {
    "latent_channels": 8,
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "patch_size": 2,
    "spatial_compression_ratio": 16,
    "decoder_causal": True,
}


def build(kind: type, **config: object) -> nn.Module:
    return fill_randomly(kind(**config)).eval().requires_grad_(False)


def wan(**config: object) -> nn.Module:
    return build(AutoencoderKLWan, **{**WAN, **config})


def wan22() -> nn.Module:
    """Wan 2.2's: residual up blocks, and pixels in patches."""
    return wan(is_residual=True, patch_size=2, in_channels=12, out_channels=12, scale_factor_spatial=16)


def ltx2(**config: object) -> nn.Module:
    return build(AutoencoderKLLTX2Video, **{**LTX2, **config})


EXACT = {
    "Wan": (wan, 4),
    "Wan 2.2": (wan22, 4),
    "Wan, time halved once": (lambda: wan(temperal_downsample=[False, True, False]), 2),
    "LTX-2": (ltx2, 8),
    "LTX-2 without residuals, time doubled first and last": (
        lambda: ltx2(upsample_residual=(False, True, False), upsample_type=("temporal", "spatial", "spatiotemporal")),
        4,
    ),
    "LTX-2 whose blocks begin by changing channels": (
        lambda: ltx2(decoder_block_out_channels=(8, 16, 16), upsample_factor=(1, 1, 1), patch_size=1),
        8,
    ),
}


@pytest.fixture(params=EXACT, scope="module")
def exact(request: pytest.FixtureRequest) -> tuple[nn.Module, int]:
    make, ratio = EXACT[request.param]
    return make(), ratio


def latents_for(
    vae: nn.Module, frames: int, *, batch: int = 1, height: int = 3, width: int = 4, seed: int = 0
) -> Tensor:
    channels = vae.config.get("latent_channels", vae.config.get("z_dim"))
    return torch.randn(batch, channels, frames, height, width, generator=torch.Generator().manual_seed(seed))


def in_one_call(vae: nn.Module, latents: Tensor, *arguments: Tensor) -> Tensor:
    with torch.no_grad():
        return vae.decode(latents, *arguments, return_dict=False)[0]


def in_chunks(decoder: StreamDecoder, latents: Tensor, cuts: list[int], *arguments: Tensor) -> Tensor:
    return torch.cat([decoder.decode(chunk, *arguments) for chunk in latents.split(cuts, dim=2)], dim=2)


def forwards(vae: nn.Module) -> list[tuple[object, ...]]:
    """What a decoder could leave behind in a VAE."""
    return [(type(m), *sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in vae.modules()]


@pytest.mark.parametrize("cuts", [[1] * 5, [4, 3, 1], [2, 1, 3], [6]], ids=str)
def test_chunks_of_any_cut_equal_one_call(exact, cuts):
    vae, ratio = exact
    latents = latents_for(vae, sum(cuts))
    expected, before = in_one_call(vae, latents), forwards(vae)
    decoder = stream_decoder(vae)
    frames = [decoder.decode(chunk) for chunk in latents.split(cuts, dim=2)]
    assert decoder.frame_ratio == ratio
    assert [f.shape[2] for f in frames] == [1 + (cuts[0] - 1) * ratio, *(ratio * cut for cut in cuts[1:])]
    assert relative_error(torch.cat(frames, dim=2), expected) <= 1e-5
    assert expected[:, :, 0].std() > 0 and relative_error(expected[:, :, -1], expected[:, :, 0]) > 0.1
    assert forwards(vae) == before
    assert torch.equal(in_one_call(vae, latents), expected)


def test_two_films_share_one_vae(exact):
    vae, _ = exact
    films = [latents_for(vae, 5, seed=seed) for seed in (1, 2)]
    decoders = [stream_decoder(vae), stream_decoder(vae)]
    frames: list[list[Tensor]] = [[], []]
    for cut in (slice(0, 2), slice(2, 3), slice(3, 5)):
        for film, decoder, out in zip(films, decoders, frames, strict=True):
            out.append(decoder.decode(film[:, :, cut]))
            in_one_call(vae, films[1][:, :, :1])  # and others use it in between
    for film, out in zip(films, frames, strict=True):
        assert relative_error(torch.cat(out, dim=2), in_one_call(vae, film)) <= 1e-5


def test_a_branch_starts_from_a_kept_state_and_a_saved_one_to_the_bit(exact, tmp_path):
    vae, _ = exact
    latents, other = latents_for(vae, 5), latents_for(vae, 2, seed=1)
    decoder = stream_decoder(vae)
    decoder.decode(latents[:, :, :3])
    kept, copy = decoder.state, decoder.state.clone()
    kept.save(tmp_path / "state.safetensors")
    expected = decoder.decode(latents[:, :, 3:])
    assert decoder.state.frames == 5 and kept.frames == copy.frames == 3
    pointers = {x.data_ptr() for x in kept.memory if x.numel()}
    assert pointers.isdisjoint(x.data_ptr() for x in copy.memory)

    branch = stream_decoder(vae)
    branch.state = kept
    whole = torch.cat([latents[:, :, :3], other], dim=2)
    assert relative_error(branch.decode(other), in_one_call(vae, whole)[:, :, -2 * decoder.frame_ratio :]) <= 1e-5
    for state in (kept, copy, DecoderState.load(tmp_path / "state.safetensors")):
        branch.state = state
        assert torch.equal(branch.decode(latents[:, :, 3:]), expected)


def test_a_state_saved_after_one_frame_is_whole(exact, tmp_path):
    """Wan's temporal upsamplers have seen nothing then."""
    vae, _ = exact
    latents = latents_for(vae, 3)
    decoder = stream_decoder(vae)
    decoder.decode(latents[:, :, :1])
    decoder.state.save(tmp_path / "state.safetensors")
    expected = decoder.decode(latents[:, :, 1:])
    decoder.state = DecoderState.load(tmp_path / "state.safetensors")
    assert torch.equal(decoder.decode(latents[:, :, 1:]), expected)


def test_a_state_does_not_grow_and_holds_no_views(exact):
    vae, _ = exact
    decoder, sizes = stream_decoder(vae), []
    for seed in range(6):
        decoder.decode(latents_for(vae, 2, seed=seed))
        sizes.append(decoder.state.nbytes)
    assert len(set(sizes)) == 1
    assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in decoder.state.memory)


def test_reset_begins_a_new_film(exact):
    vae, _ = exact
    latents, decoder = latents_for(vae, 3), stream_decoder(vae)
    first = in_chunks(decoder, latents, [2, 1])
    decoder.reset()
    assert decoder.state.frames == 0
    assert torch.equal(in_chunks(decoder, latents_for(vae, 3, height=2), [3]), in_one_call_chunk(vae, height=2))
    decoder.reset()
    assert torch.equal(in_chunks(decoder, latents, [2, 1]), first)


def in_one_call_chunk(vae: nn.Module, **size: int) -> Tensor:
    return stream_decoder(vae).decode(latents_for(vae, 3, **size))


def test_states_of_equal_size_stack_into_a_batch_and_split_again(exact):
    vae, _ = exact
    films = [latents_for(vae, 4, seed=seed) for seed in (1, 2)]
    decoders = [stream_decoder(vae), stream_decoder(vae)]
    for film, decoder in zip(films, decoders, strict=True):
        decoder.decode(film[:, :, :3])
    both = stream_decoder(vae)
    both.state = DecoderState.stack([d.state for d in decoders])
    frames = both.decode(torch.cat([film[:, :, 3:] for film in films]))
    for film, decoder, state, ours in zip(films, decoders, both.state.split(), frames.split(1), strict=True):
        assert relative_error(ours, decoder.decode(film[:, :, 3:])) <= 1e-5
        decoder.state = state
        decoder.decode(film[:, :, 3:])


@pytest.mark.parametrize("make", [wan, wan22, ltx2], ids=["Wan", "Wan 2.2", "LTX-2"])
def test_spatial_tiles_and_slices_are_those_of_the_vae(make):
    vae = make()
    scale = vae.spatial_compression_ratio
    vae.enable_tiling(4 * scale, 4 * scale)
    vae.tile_sample_stride_height, vae.tile_sample_stride_width = 3 * scale, 2 * scale
    vae.enable_slicing()
    latents = latents_for(vae, 4, batch=2, height=5, width=6)
    expected = in_one_call(vae, latents)
    vae.disable_tiling()
    assert relative_error(in_one_call(vae, latents), expected) > 1e-3
    vae.enable_tiling()
    decoder = stream_decoder(vae)
    assert relative_error(in_chunks(decoder, latents, [2, 1, 1]), expected) <= 1e-5
    assert len(decoder.state.tiles) == 6
    vae.disable_tiling()
    with pytest.raises(ValueError, match="tiling changed"):
        decoder.decode(latents[:, :, :1])


def test_timesteps_reach_every_block():
    vae = ltx2(timestep_conditioning=True)
    latents, temb = latents_for(vae, 5, batch=2), torch.tensor([0.05, 0.4])
    expected = in_one_call(vae, latents, temb)
    assert relative_error(in_chunks(stream_decoder(vae), latents, [1, 4], temb), expected) <= 1e-5
    assert relative_error(in_one_call(vae, latents, temb.flip(0)), expected) > 1e-3
    with pytest.raises(ValueError, match="needs temb"):
        stream_decoder(vae).decode(latents)
    with pytest.raises(ValueError, match="takes no temb"):
        stream_decoder(ltx2()).decode(latents, temb)


def test_injected_noise_is_one_picture_for_the_whole_film(tmp_path):
    vae = ltx2(decoder_inject_noise=True, upsample_factor=(1, 1, 1), decoder_block_out_channels=(8, 8, 8))
    latents, decoder = latents_for(vae, 4), stream_decoder(vae)
    frames = in_chunks(decoder, latents[:, :, :3], [2, 1])
    decoder.state.save(tmp_path / "state.safetensors")
    decoder.state = DecoderState.load(tmp_path / "state.safetensors")
    frames = torch.cat([frames, decoder.decode(latents[:, :, 3:])], dim=2)
    torch.manual_seed(decoder.state.seed)
    expected = in_one_call(vae, latents)
    assert relative_error(frames, expected) <= 1e-5
    assert relative_error(in_one_call(vae, latents), expected) > 1e-3


@pytest.mark.parametrize("make", [wan, ltx2], ids=["Wan", "LTX-2"])
def test_bfloat16_and_autocast_give_what_one_call_gives(make):
    vae = make()
    latents = latents_for(vae, 4)
    exact = in_one_call(vae, latents)
    with torch.autocast("cpu", torch.bfloat16):
        error = relative_error(in_one_call(vae, latents), exact)
        assert relative_error(in_chunks(stream_decoder(vae), latents, [2, 1, 1]), exact) <= 1.5 * error
    vae.to(torch.bfloat16)
    error = relative_error(in_one_call(vae, latents.bfloat16()), exact)
    decoder = stream_decoder(vae)
    frames = in_chunks(decoder, latents, [2, 1, 1])
    assert frames.dtype == torch.bfloat16 and relative_error(frames, exact) <= 1.5 * error
    vae.float()
    with pytest.raises(ValueError, match="decoded in torch.bfloat16"):
        decoder.decode(latents)
    decoder.state = decoder.state.to(dtype=torch.float32)
    assert decoder.decode(latents).dtype == torch.float32


@pytest.mark.parametrize("make", [wan, ltx2], ids=["Wan", "LTX-2"])
def test_offloaded_vaes_decode(make):
    vae = make()
    latents = latents_for(vae, 4)
    expected = in_one_call(vae, latents)
    _, hook = cpu_offload_with_hook(vae, "cpu")
    moves = []
    move = vae._hf_hook.pre_forward
    vae._hf_hook.pre_forward = lambda *args, **kwargs: moves.append(1) or move(*args, **kwargs)
    assert relative_error(in_chunks(stream_decoder(vae), latents, [3, 1]), expected) <= 1e-5
    assert len(moves) == 2
    hook.remove()

    cpu_offload(vae, execution_device=torch.device("cpu"))
    assert all(p.device.type == "meta" for p in vae.decoder.parameters())
    assert relative_error(in_chunks(stream_decoder(vae), latents, [3, 1]), expected) <= 1e-5


def test_a_compiled_decoder_is_streamed_as_its_original():
    """A compiled forward knows nothing of the chunks before; it would be wrong without a word."""
    vae = ltx2()
    latents = latents_for(vae, 3)
    expected = in_one_call(vae, latents)
    for compile_it in (lambda: vae.decoder.up_blocks[0].compile(backend="eager"), lambda: compile_whole(vae)):
        compile_it()
        assert relative_error(in_chunks(stream_decoder(vae), latents, [2, 1]), expected) <= 1e-5


def compile_whole(vae: nn.Module) -> None:
    vae.decoder = torch.compile(vae.decoder, backend="eager")


def test_layers_that_were_replaced_after_the_decoder_was_made_are_used():
    vae = ltx2()
    latents, decoder = latents_for(vae, 3), stream_decoder(vae)
    for conv in [m for m in vae.decoder.modules() if hasattr(m, "kernel_size") and hasattr(m, "conv")]:
        conv.conv = fill_randomly(nn.Sequential(conv.conv), seed=5)  # as an adapter or a quantised layer
    assert relative_error(in_chunks(decoder, latents, [1, 2]), in_one_call(vae, latents)) <= 1e-5


def test_other_vaes_overlap_by_one_latent_frame_and_say_so_once():
    vae = ltx2(decoder_causal=False)
    latents = latents_for(vae, 6)
    with pytest.warns(UserWarning, match="looks at later frames") as caught:
        decoder = stream_decoder(vae)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frames = [decoder.decode(chunk) for chunk in latents.split([1, 3, 2], dim=2)]
        assert stream_decoder(ltx2()).frame_ratio == 8
    assert [f.shape[2] for f in frames] == [1, 24, 16]
    assert torch.equal(frames[1], in_one_call(vae, latents[:, :, :4])[:, :, 1:])
    assert torch.equal(frames[2], in_one_call(vae, latents[:, :, 3:])[:, :, 1:])


OTHERS = {
    "LTX": lambda: build(
        AutoencoderKLLTXVideo,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        patch_size=1,
    ),
    "Mochi, which does not say its ratio of 6": lambda: build(
        AutoencoderKLMochi,
        latent_channels=4,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.filterwarnings("ignore:.*looks at later frames")
def test_any_vae_whose_first_latent_is_one_frame_gives_all_frames(kind):
    vae = OTHERS[kind]()
    latents = latents_for(vae, 5, height=2, width=2)
    decoder = stream_decoder(vae)
    assert in_chunks(decoder, latents, [1, 2, 2]).shape == in_one_call(vae, latents).shape


@pytest.mark.filterwarnings("ignore:.*looks at later frames")
def test_a_vae_with_another_count_of_frames_is_refused():
    cogvideo = build(
        AutoencoderKLCogVideoX,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    decoder = stream_decoder(cogvideo)
    assert decoder.decode(latents_for(cogvideo, 3)).shape[2] == 9
    before = decoder.state
    with pytest.raises(ValueError, match=r"1 \+ \(T - 1\) · 4 frames .* AutoencoderKLCogVideoX gave 8 for 2"):
        decoder.decode(latents_for(cogvideo, 1))
    assert decoder.state is before


def test_an_autoencoder_of_images_decodes_frame_by_frame():
    vae = build(
        AutoencoderDC,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        downsample_block_type="Conv",
        upsample_block_type="interpolate",
    )
    latents, decoder = latents_for(vae, 5, batch=2), stream_decoder(vae)
    expected = torch.stack([in_one_call(vae, latents[:, :, t]) for t in range(5)], dim=2)
    assert relative_error(in_chunks(decoder, latents, [1, 3, 1]), expected) <= 1e-5
    assert decoder.frame_ratio == 1


def test_bad_latents_are_named_and_leave_the_state_alone():
    vae = wan()
    decoder = stream_decoder(vae)
    for bad in (torch.randn(1, 4, 3, 4), torch.randn(1, 5, 1, 3, 4), torch.ones(1, 4, 1, 3, 4).long(), [[1.0]]):
        with pytest.raises(ValueError, match=r"latents must be a tensor \(B, 4, T, h, w\)"):
            decoder.decode(bad)
    with pytest.raises(ValueError, match="at least one frame"):
        decoder.decode(torch.randn(1, 4, 0, 3, 4))
    with pytest.raises(ValueError, match="must be a DecoderState"):
        decoder.state = {}
    decoder.decode(latents_for(vae, 2))
    before = decoder.state
    for other in (latents_for(vae, 1, batch=2), latents_for(vae, 1, height=4)):
        with pytest.raises(ValueError, match=r"the film's latents are \(B, C, h, w\) = \(1, 4, 3, 4\)"):
            decoder.decode(other)
    with pytest.raises(ValueError, match="on one device"):
        decoder.decode(latents_for(vae, 1).to("meta"))
    assert decoder.state is before
    with pytest.raises(ValueError, match="takes a VAE of diffusers, got Linear"):
        stream_decoder(nn.Linear(1, 1))


def test_a_state_of_another_vae_or_a_damaged_file_is_refused(tmp_path):
    decoder, path = stream_decoder(wan()), tmp_path / "state.safetensors"
    decoder.decode(latents_for(decoder.vae, 2))
    with pytest.raises(ValueError, match="AutoencoderKLLTX2Video:.* got a state of AutoencoderKLWan:"):
        stream_decoder(ltx2()).state = decoder.state
    with pytest.raises(ValueError, match="got a state of"):
        stream_decoder(wan(num_res_blocks=2)).state = decoder.state
    decoder.state.save(path)
    content = path.read_bytes()
    for length in (0, 7, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="not a state, or not the whole of one"):
            DecoderState.load(path)
    path.write_bytes(content.replace(b'"version":"1"', b'"version":"7"'))
    with pytest.raises(ValueError, match="must be a frame_gdn.DecoderState of version 1, got .*7"):
        DecoderState.load(path)
    with pytest.raises(ValueError, match="can be stacked"):
        DecoderState.stack([decoder.state, stream_decoder(wan()).state])
    with pytest.raises(FileNotFoundError):
        DecoderState.load(tmp_path / "none.safetensors")


def test_a_saved_state_fits_the_saved_vae(exact, tmp_path):
    vae, _ = exact
    vae.save_pretrained(tmp_path / "vae")
    again = type(vae).from_pretrained(tmp_path / "vae").eval()
    decoder, resumed, latents = stream_decoder(vae), stream_decoder(again), latents_for(vae, 3)
    decoder.decode(latents[:, :, :2])
    resumed.state = decoder.state
    assert torch.equal(resumed.decode(latents[:, :, 2:]), decoder.decode(latents[:, :, 2:]))


def test_latents_are_normalised_as_the_pipelines_do_it():
    latents = torch.randn(1, 4, 2, 3, 4)
    expected = latents / (1.0 / torch.tensor([2.0] * 4).view(1, 4, 1, 1, 1)) + 0.1  # WanPipeline
    assert relative_error(denormalize_latents(wan(), latents), expected) <= 1e-6

    vae, latents = ltx2(scaling_factor=0.7), torch.randn(1, 8, 2, 3, 4)
    vae.latents_mean.normal_()
    vae.latents_std.uniform_(0.5, 2)
    mean, std = vae.latents_mean.view(1, -1, 1, 1, 1), vae.latents_std.view(1, -1, 1, 1, 1)
    expected = latents / vae.config.scaling_factor * std + mean  # SanaWMPipeline
    assert relative_error(denormalize_latents(vae, latents), expected) <= 1e-6
    assert relative_error(normalize_latents(vae, denormalize_latents(vae, latents)), latents) <= 1e-6
    assert denormalize_latents(vae, latents.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match=r"latents must be \(B, 8, T, h, w\)"):
        denormalize_latents(vae, latents[:, :4])
