"""Weight decay acts on weights alone, the learning rate follows the options, a step that is not finite is refused."""

import math
import typing

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from frame_gdn import swap
from models import VideoDiT
from tests.hosts.warm_start import tiny_model
from training.config import OptimizationConfig
from training.optimization import SKIPPED_STEPS, Step, build_schedule, look_at, parameter_groups, stop_if_diverged


@pytest.fixture
def accelerator() -> typing.Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def video_dit() -> VideoDiT:
    return VideoDiT(
        4, num_layers=2, num_attention_heads=2, attention_head_dim=12, softmax_every_n=2, cross_attention_dim=8
    )


@pytest.mark.parametrize("name", ["video_dit", "sana_video", "wan"])
def test_weight_decay_spares_norms_biases_and_what_gates_start_from(name: str) -> None:
    model = video_dit() if name == "video_dit" else swap(tiny_model(name))
    model.requires_grad_(True)
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    decays, stays = parameter_groups(model, 0.1)
    assert (decays["weight_decay"], stays["weight_decay"]) == (0.1, 0.0)
    groups = {id(p): kind for kind, group in (("decays", decays), ("stays", stays)) for p in group["params"]}
    assert len(groups) == len(decays["params"]) + len(stays["params"]) == len(list(model.parameters())) - 1
    for key, parameter in model.named_parameters():
        if parameter is frozen:
            assert id(parameter) not in groups
            continue
        spared = any(part in key for part in ("bias", "norm_q", "norm_k", "q_norm", "A_log", "scale_shift_table"))
        spared = spared or parameter.dim() == 1
        assert groups[id(parameter)] == ("stays" if spared else "decays"), key
    assert {key.rpartition(".")[2] for key, p in model.named_parameters() if groups.get(id(p)) == "stays"} >= {
        "A_log",
        "dt_bias",
        "bias",
        "scale_shift_table",
    }


def test_a_norm_of_two_dimensions_and_a_shared_matrix() -> None:
    class HeadNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

    linear = nn.Linear(3, 3)
    decays, stays = parameter_groups(nn.ModuleList([HeadNorm(), linear, nn.Sequential(linear)]), 0.1)
    assert [p.shape for p in decays["params"]] == [(3, 3)] and len(stays["params"]) == 2


SCHEDULERS = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_schedule_is_that_of_the_options_at_that_step(name: str) -> None:
    config = OptimizationConfig(learning_rate=0.1, lr_scheduler=name, lr_warmup_steps=3, lr_num_cycles=2, lr_power=2.0)

    def rates(taken: int) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
        optimizer.param_groups[0]["lr"] = 7.0  # whatever a checkpoint says
        schedule = build_schedule(config, optimizer, 20, taken)
        found = []
        for _ in range(taken, 20):
            assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    whole = rates(0)
    for taken in (1, 2, 3, 11):
        assert rates(taken) == whole[taken:]


CLIPS, LOSSES = [["a", "b"], ["c", "b"]], [torch.tensor(1.0), torch.tensor(math.nan)]


@pytest.mark.parametrize("loss, grad_norm", [(math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)])
def test_a_step_that_is_not_finite_is_refused_by_step_and_clips(
    accelerator: Accelerator, loss: float, grad_norm: float
) -> None:
    with pytest.raises(
        FloatingPointError, match=f"step 7: the loss is {loss:.4g}.*norm {grad_norm:.4g}; clips: c, b$"
    ):
        stop_if_diverged(accelerator, Step(loss, grad_norm), 0, CLIPS, LOSSES, "step 7")
    finite = [torch.tensor(1.0)] * 2
    with pytest.raises(FloatingPointError, match="clips: a, b, c$"):
        stop_if_diverged(accelerator, Step(loss, grad_norm), 0, CLIPS, finite, "step 7")


def test_loss_scaling_may_skip_steps_but_not_for_ever(accelerator: Accelerator) -> None:
    accelerator.scaler = torch.amp.GradScaler("cpu")
    overflow = Step(1.0, math.inf)
    for skipped_steps in range(SKIPPED_STEPS):
        stop_if_diverged(accelerator, overflow, skipped_steps, CLIPS, LOSSES, "step 7")
    with pytest.raises(FloatingPointError, match=f"{SKIPPED_STEPS} steps in a row were skipped"):
        stop_if_diverged(accelerator, overflow, SKIPPED_STEPS, CLIPS, LOSSES, "step 7")
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        stop_if_diverged(accelerator, Step(math.nan, math.inf), 0, CLIPS, LOSSES, "step 7")


def test_many_clips_are_named_in_part(accelerator: Accelerator) -> None:
    clips = [[f"clip{i}"] for i in range(11)]
    with pytest.raises(FloatingPointError, match="clip6, clip7 and 3 more$"):
        stop_if_diverged(accelerator, Step(math.nan, 0.0), 0, clips, [torch.tensor(0.0)] * 11, "step 7")


def test_a_step_is_the_mean_of_its_batches(accelerator: Accelerator) -> None:
    losses = [torch.tensor(1.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)]
    assert look_at(accelerator, losses, torch.tensor(0.25)) == Step(1.5, 0.25)
