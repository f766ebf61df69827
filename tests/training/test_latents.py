import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLLTXVideo, AutoencoderKLWan

from frame_gdn.decoding import denormalize_latents, latent_statistics, normalize_latents
from training.data import demo_clips
from training.latents import HaarCodec, VaeCodec, latent_shape, load_codec
from training.video import read_video

BUNNY = demo_clips()[0]


def tiny_wan_vae(**options) -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        **options,
    )


def test_haar_latents_are_exact_to_the_byte():
    codec = HaarCodec()
    for path in demo_clips():
        video = read_video(path, 64, 64, num_frames=45)
        latents = codec.encode(video)
        assert latents.dtype == torch.float32 and latents.shape == (192, 12, 16, 16)
        assert latents.shape == latent_shape(codec, 45, 64, 64)
        assert torch.equal(codec.decode(latents), video)


def test_haar_latents_of_noise_are_exact_to_the_byte():
    video = torch.randint(0, 256, (2, 3, 9, 20, 12, 3), dtype=torch.uint8)
    codec = HaarCodec(scale=0.3)
    assert torch.equal(codec.decode(codec.encode(video)), video)


def test_a_prefix_of_a_video_is_a_prefix_of_its_latents():
    video, codec = read_video(BUNNY, 32, 32, num_frames=33), HaarCodec()
    for frames in range(1, 10):
        torch.testing.assert_close(codec.encode(video[: 4 * frames - 3]), codec.encode(video)[:, :frames])


def test_channels_that_carry_the_picture_have_about_unit_deviation():
    codec = HaarCodec()
    latents = torch.stack([codec.encode(read_video(path, 64, 64, num_frames=45)) for path in demo_clips()])
    assert 0.7 < latents[:, :3].std() < 1.3
    assert latents[:, 3:].std() < 0.2


@pytest.mark.parametrize(
    ("shape", "message"),
    [((8, 16, 16), r"num_frames must be 1 \+ 4·k, got 8"), ((9, 18, 16), "multiples of 4, got 18 × 16")],
)
def test_a_clip_that_does_not_fit_is_an_error(shape, message):
    with pytest.raises(ValueError, match=message):
        HaarCodec().encode(torch.zeros(*shape, 3, dtype=torch.uint8))


def test_pixels_that_are_not_bytes_are_an_error():
    with pytest.raises(ValueError, match="uint8"):
        HaarCodec().encode(torch.zeros(9, 16, 16, 3))


def test_a_codec_is_built_again_from_its_description(tmp_path):
    tiny_wan_vae().save_pretrained(tmp_path / "vae")
    video = read_video(BUNNY, 32, 32, num_frames=5)
    for codec in (HaarCodec(scale=0.5), VaeCodec(str(tmp_path), subfolder="vae")):
        again = load_codec(codec.describe())
        assert again.describe() == codec.describe()
        assert torch.equal(again.encode(video), codec.encode(video))
    with pytest.raises(ValueError, match="'haar' or 'vae'"):
        load_codec({"kind": "wavelet"})


def test_vae_latents_are_normalised_by_their_own_mean_and_deviation(tmp_path):
    vae = tiny_wan_vae()
    vae.save_pretrained(tmp_path)
    codec = VaeCodec(str(tmp_path))
    video = read_video(BUNNY, 32, 48, num_frames=9)
    latents = codec.encode(video)
    assert latents.shape == latent_shape(codec, 9, 32, 48) == (16, 3, 4, 6)

    pixels = video.permute(3, 0, 1, 2)[None] / 127.5 - 1
    mean, std = (torch.tensor(vae.config[f"latents_{name}"]).view(-1, 1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        raw = vae.encode(pixels).latent_dist.mode()
        decoded = vae.decode(raw).sample[0].permute(1, 2, 3, 0)
    torch.testing.assert_close(latents, (raw[0] - mean) / std)
    assert (codec.decode(latents) - (decoded + 1) * 127.5).abs().max() < 0.51
    assert codec.decode(latents[None]).shape == (1, 9, 32, 48, 3)


def test_a_scaling_factor_stands_for_a_deviation():
    mean, std = latent_statistics(AutoencoderKL(scaling_factor=0.5, shift_factor=0.25, latent_channels=2))
    assert (mean.tolist(), std.tolist()) == ([0.25, 0.25], [2.0, 2.0])


def test_means_in_buffers_are_found_and_the_scaling_factor_applies_too():
    vae = AutoencoderKLLTXVideo(
        latent_channels=2,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        scaling_factor=2.0,
    )
    vae.latents_mean.copy_(torch.tensor([1.0, -1.0]))
    vae.latents_std.copy_(torch.tensor([2.0, 4.0]))
    mean, std = latent_statistics(vae)
    assert (mean.tolist(), std.tolist()) == ([1.0, -1.0], [1.0, 2.0])
    x = torch.randn(1, 2, 3, 4, 5)
    torch.testing.assert_close(denormalize_latents(vae, normalize_latents(vae, x)), x)


def test_a_vae_that_does_not_say_its_normalisation_is_an_error():
    with pytest.raises(ValueError, match="neither latents_mean"):
        latent_statistics(tiny_wan_vae(latents_mean=None, latents_std=None))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"latents_mean": [0.0]}, r"latents_mean must be 16 finite numbers.*\[0.0\]"),
        ({"latents_std": ["a"] + [1.0] * 15}, "latents_std must be 16 finite numbers.*'a'"),
        ({"latents_mean": [float("nan")] + [0.0] * 15}, "latents_mean must be 16 finite numbers.*nan"),
        ({"latents_std": [0.0] + [1.0] * 15}, "above 0"),
        ({"latents_std": [-1.0] + [1.0] * 15}, "above 0"),
    ],
    ids=str,
)
def test_statistics_that_are_not_one_number_a_channel_are_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        latent_statistics(tiny_wan_vae(**wrong))
