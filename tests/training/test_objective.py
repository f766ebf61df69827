"""Noise depends on (seed, sample) alone, levels are those of a rollout, and the loss is the same in any layout."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from training.config import ObjectiveConfig
from training.objective import SMALLEST_LEVEL, add_noise, flow_loss, sample_noise, split_frames

SHAPE = (3, 8, 2, 4)  # C, T, h, w


def test_split_covers_all_frames_with_none_left_empty() -> None:
    assert [split_frames(12, size) for size in (1, 2, 3, 5)] == [[12], [6, 6], [4, 4, 4], [3, 3, 2, 2, 2]]
    with pytest.raises(ValueError, match="cp_size 4 is more than the 3 latent frames"):
        split_frames(3, 4)


def test_noise_of_a_sample_depends_on_seed_and_number_alone() -> None:
    config = ObjectiveConfig()
    together = sample_noise(config, SHAPE, [4, 7], seed=1, chunk_frames=3)
    alone = sample_noise(config, SHAPE, [7], seed=1, chunk_frames=3)
    assert torch.equal(together.noise[1:], alone.noise) and torch.equal(together.sigmas[1:], alone.sigmas)
    for number, seed in ((8, 1), (7, 2)):
        other = sample_noise(config, SHAPE, [number], seed, chunk_frames=3)
        assert not torch.equal(other.noise, alone.noise) and not torch.equal(other.sigmas, alone.sigmas)


@pytest.mark.parametrize("scheme", ["logit_normal", "mode", "none"])
def test_a_chunk_has_one_level_and_half_the_samples_a_clean_prefix(scheme: str) -> None:
    config = ObjectiveConfig(weighting_scheme=scheme)
    sigmas = sample_noise(config, (1, 8, 1, 1), list(range(2000)), seed=0, chunk_frames=3).sigmas
    chunks = sigmas[:, ::3]
    assert torch.equal(chunks.repeat_interleave(3, dim=1)[:, :8], sigmas)
    assert (sigmas[:, -1] >= SMALLEST_LEVEL).all() and (sigmas <= 1).all()
    clean = (chunks == 0).sum(dim=1)
    assert torch.equal(chunks == 0, torch.arange(3) < clean[:, None])
    shares = torch.bincount(clean, minlength=3) / 2000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.25, 0.25]), atol=0.05, rtol=0)
    assert (chunks[clean == 0].diff(dim=1) != 0).all()


def test_a_bidirectional_clip_has_one_level_and_no_clean_frame() -> None:
    sigmas = sample_noise(ObjectiveConfig(), SHAPE, list(range(50)), seed=0).sigmas
    assert (sigmas > 0).all() and torch.equal(sigmas, sigmas[:, :1].expand_as(sigmas))


def test_levels_are_a_sigmoid_of_a_normal_and_shifted_as_the_scheduler_shifts() -> None:
    draw = ObjectiveConfig(logit_mean=0.4, logit_std=1.2)
    logits = sample_noise(draw, (1, 1, 1, 1), list(range(4000)), seed=0).sigmas.logit()
    assert abs(logits.mean() - 0.4) < 0.1 and abs(logits.std() - 1.2) < 0.1

    plain = sample_noise(ObjectiveConfig(), SHAPE, [0], seed=0).sigmas
    shifted = sample_noise(ObjectiveConfig(flow_shift=3.0), SHAPE, [0], seed=0).sigmas
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=plain[0].tolist())
    torch.testing.assert_close(shifted[0], scheduler.sigmas[:-1])


def test_noising_and_velocity_are_the_schedulers() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(5)
    latents, noise = torch.randn(1, *SHAPE), torch.randn(1, *SHAPE)
    timestep = scheduler.timesteps[2:3]
    noisy = add_noise(latents, noise, (timestep / 1000).expand(1, SHAPE[1]))
    torch.testing.assert_close(noisy, scheduler.scale_noise(latents, timestep, noise))

    less_noisy = scheduler.step(noise - latents, timestep[0], noisy).prev_sample
    torch.testing.assert_close(less_noisy, add_noise(latents, noise, scheduler.sigmas[3].expand(1, SHAPE[1])))


def test_clean_frames_stay_untouched_and_out_of_the_loss() -> None:
    latents, noise = torch.randn(1, *SHAPE), torch.randn(1, *SHAPE)
    sigmas = torch.tensor([[0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.2, 0.2]])
    assert torch.equal(add_noise(latents, noise, sigmas)[:, :, :3], latents[:, :, :3])

    prediction = (noise - latents).requires_grad_()
    with torch.no_grad():
        prediction[:, :, :3] += 100
        prediction[:, :, 3:] += 2
    loss = flow_loss(prediction, latents, noise, sigmas, prediction_type="velocity", noised_frames=(sigmas > 0).sum(1))
    torch.testing.assert_close(loss, torch.tensor(4.0))
    (gradient,) = torch.autograd.grad(loss, prediction)
    assert (gradient[:, :, :3] == 0).all() and (gradient[:, :, 3:] != 0).all()


def test_loss_of_a_predicted_clip_is_that_of_the_velocity_it_implies() -> None:
    latents, noise = torch.randn(2, *SHAPE, dtype=torch.float64), torch.randn(2, *SHAPE, dtype=torch.float64)
    sigmas = torch.tensor([0.1, 0.7]).to(torch.float64)[:, None].expand(2, SHAPE[1])
    prediction = torch.randn_like(latents)
    velocity = (add_noise(latents, noise, sigmas) - prediction) / sigmas[:, None, :, None, None]
    count = torch.full((2,), SHAPE[1])
    as_sample = flow_loss(prediction, latents, noise, sigmas, prediction_type="sample", noised_frames=count)
    as_velocity = flow_loss(velocity, latents, noise, sigmas, prediction_type="velocity", noised_frames=count)
    torch.testing.assert_close(as_sample, as_velocity, rtol=1e-12, atol=0)


def test_shards_add_up_to_the_clip_and_micro_batches_average_to_the_batch() -> None:
    config = ObjectiveConfig()
    latents, prediction = torch.randn(4, *SHAPE, dtype=torch.float64), torch.randn(4, *SHAPE, dtype=torch.float64)
    noise, sigmas = (x.double() for x in sample_noise(config, SHAPE, [0, 1, 2, 3], seed=5, chunk_frames=3))

    def loss(samples: slice, frames: slice) -> torch.Tensor:
        return flow_loss(
            *(x[samples, :, frames] for x in (prediction, latents, noise)),
            sigmas[samples, frames],
            prediction_type="sample",
            noised_frames=(sigmas[samples] > 0).sum(dim=1),
        )

    whole = loss(slice(None), slice(None))
    shards = [loss(slice(None), slice(*ends)) for ends in ((0, 3), (3, 4), (4, 8))]
    torch.testing.assert_close(sum(shards), whole, rtol=1e-13, atol=0)
    micro_batches = [loss(slice(i, i + 1), slice(None)) for i in range(4)]
    torch.testing.assert_close(sum(micro_batches) / 4, whole, rtol=1e-13, atol=0)
