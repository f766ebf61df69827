"""How weights move: what weight decay acts on, the learning rate of a step, and when a run has diverged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers.optimization import get_scheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from training.config import OptimizationConfig
from training.stopping import EXIT_CODES

SKIPPED_STEPS = 40
"""fp16's loss scale starts at 2^16 and is halved for each skipped step; after this many in a row gradients vanish."""

NAMED_CLIPS = 8
"""How many clips an error names."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters that are trained, as groups of an optimizer: those that decay, and those that do not.

    Decay pulls towards 0, which is right for what multiplies an input: matrices, kernels of convolutions, tables of
    embeddings. A norm's weight belongs near 1, and A_log, dt_bias, biases and tables of shifts are where they are
    trained to.
    """
    decays: dict[nn.Parameter, bool] = {}  # a dictionary, since modules may share a parameter
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                is_weight = parameter.dim() > 1 and "bias" not in name and "shift" not in name
                decays[parameter] = is_weight and "Norm" not in type(module).__name__
    groups = [
        {"params": [parameter for parameter, decayed in decays.items() if decayed == kind], "weight_decay": decay}
        for kind, decay in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]


def build_schedule(config: OptimizationConfig, optimizer: Optimizer, max_train_steps: int, taken: int = 0) -> LambdaLR:
    """The learning rate as a function of the steps of the optimizer, from the options alone.

    So a run that is resumed with another learning rate, schedule or length has the rate that the new options give.

    Args:
        taken: steps of the optimizer before this run.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = config.learning_rate
    return get_scheduler(
        config.lr_scheduler,
        optimizer,
        num_warmup_steps=config.lr_warmup_steps,
        num_training_steps=max_train_steps,
        num_cycles=config.lr_num_cycles,
        power=config.lr_power,
        last_epoch=taken - 1,  # that of the step before; the constructor takes one step
    )


class Step(NamedTuple):
    """What is known of a step before the optimizer takes it, the same on all ranks: means over ranks."""

    loss: float
    grad_norm: float
    exit_code: int | None = None  # of a request that the run ends after this step, on any rank

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def look_at(
    accelerator: Accelerator, losses: Sequence[Tensor], grad_norm: Tensor, exit_code: int | None = None
) -> Step:
    """A step's one look at the device: its loss and gradient norm, in one message between the ranks.

    Args:
        losses: scalars of this rank's batches, whose mean is its loss.
        grad_norm: of the whole gradient.
        exit_code: of a request to this rank, one of EXIT_CODES; the largest of any rank is that of all.
    """
    requests = losses[0].new_tensor([exit_code == code for code in EXIT_CODES.values()])
    of_rank = torch.stack([torch.stack(list(losses)).mean(), grad_norm.to(losses[0]), *requests])
    loss, norm, *asked = accelerator.reduce(of_rank, "mean").tolist()
    codes = [code for code, share in zip(EXIT_CODES.values(), asked, strict=True) if share > 0]
    return Step(loss, norm, max(codes, default=None))


def stop_if_diverged(
    accelerator: Accelerator,
    step: Step,
    skipped_steps: int,
    clips: Sequence[Sequence[str]],
    losses: Sequence[Tensor],
    where: str,
) -> None:
    """Refuse a step that is not finite, on all ranks alike, before the optimizer takes it.

    Under fp16's loss scaling a gradient that overflows is no error as long as the loss is finite: the optimizer skips
    that step and the scale is halved.

    Args:
        skipped_steps: steps in a row before this one that loss scaling skipped.
        clips, losses: names and loss of each of this rank's batches.
        where: the step and what is left of the run, for the error.

    Raises:
        FloatingPointError: naming the clips whose loss is not finite, or all where each is.
    """
    is_scaled = accelerator.scaler is not None
    if step.is_finite or (is_scaled and math.isfinite(step.loss) and skipped_steps < SKIPPED_STEPS):
        return
    values = torch.stack(list(losses)).tolist()
    of_rank = [(name, value) for names, value in zip(clips, values, strict=True) for name in names]
    of_all: list[tuple[str, float]] = gather_object(of_rank)
    named = [name for name, value in of_all if not math.isfinite(value)] or [name for name, _ in of_all]
    named = list(dict.fromkeys(named))
    rest = f" and {len(named) - NAMED_CLIPS} more" if len(named) > NAMED_CLIPS else ""
    skipped = f", {skipped_steps} steps in a row were skipped" if skipped_steps else ""
    raise FloatingPointError(
        f"{where}: the loss is {step.loss:.4g}, the gradient norm {step.grad_norm:.4g}{skipped}; "
        f"clips: {', '.join(named[:NAMED_CLIPS])}{rest}"
    )
