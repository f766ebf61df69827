"""Train a video diffusion transformer on video clips, over as many ranks as there are.

    accelerate launch --multi_gpu --num_processes 2 train.py --config configs/demo.yaml --output_dir runs/mine

accelerate owns the processes. `--cp_size` of them share the frames of one clip (a context-parallel group); the groups
are data parallel. The options are in `training/config.py`.
"""

from __future__ import annotations

import os

__launcher__ = os.getppid()  # before the imports, which take seconds in which it may end

import json
import logging
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, prepare_data_loader, skip_first_batches
from accelerate.logging import get_logger
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    extract_model_from_parallel,
    set_seed,
)
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from frame_gdn import FrameGDNRolloutPipeline, parallelize
from frame_gdn.hosts import SwapOptions
from models import VideoDiT
from training.checkpoints import Checkpoints, Metrics, sole_run
from training.cli import run
from training.config import TrainConfig, parse_config
from training.data import VideoLatents
from training.evaluation import check_continuation, continuation_psnr, continue_clip
from training.hosts import (
    check_data,
    choose_parameters,
    describe_model,
    grid_of,
    load_transformer,
    model_inputs,
    plain_copy,
)
from training.latents import load_codec
from training.objective import Noise, add_noise, flow_loss, sample_noise, split_frames
from training.optimization import build_schedule, look_at, parameter_groups, stop_if_diverged
from training.ranks import Ranks
from training.state import RunState, flush_tree
from training.stopping import Stop, ignore_signals_but_from_parent

NUM_TRAIN_TIMESTEPS = 1000  # of the scheduler: the model's unit of noise levels

DISTRIBUTED_TYPES = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.FSDP)

logger = get_logger("train")


def main(config: TrainConfig, launcher: int | None = None) -> int:
    """Join the other processes, train, and return the exit code: 0, or 130 for a run that SIGINT ended.

    Args:
        launcher: the process that started this one, if the run is to end with it.
    """
    with Stop(launcher, patience=config.collective_timeout) as stop:
        accelerator = start_accelerator(config)
        with Ranks.joined(stall=0.8 * config.collective_timeout) as ranks:
            with sole_run(Path(config.output_dir), ranks):
                train(config, accelerator, ranks, stop)
        accelerator.end_training()
    return stop.code or 0


def train(config: TrainConfig, accelerator: Accelerator, ranks: Ranks, stop: Stop) -> None:
    mesh = build_mesh(accelerator, config)
    cp_rank = accelerator.process_index % config.cp_size
    dp_rank, dp_size = accelerator.process_index // config.cp_size, accelerator.num_processes // config.cp_size
    set_seed(config.seed)

    # Data: the ranks of a context-parallel group read the same clips, and each keeps its own frames.
    ranks.doing("reading the data", alone=True)
    # The main process encodes videos, the others find them encoded.
    dataset = ranks.main_first(lambda: VideoLatents(**{"seed": config.seed, **config.data}))
    check_alike(ranks, dataset)
    shape = dataset.latent_shape
    channels, num_frames, *_ = shape
    frames_per_rank = split_frames(num_frames, config.cp_size)
    first = sum(frames_per_rank[:cp_rank])
    own_frames = slice(first, first + frames_per_rank[cp_rank])
    loader = build_loader(config, dataset, accelerator.device, mesh)

    # Model.
    ranks.doing("building the model", alone=True)
    dtype = getattr(torch, config.weight_dtype)
    model = build_model(config, channels, dtype)
    check_data(model, dataset.shapes, dataset.prompts)
    choose_parameters(model, dataset.shapes, gates_only=config.train_gates_only, lora_rank=config.lora_rank)
    grid = grid_of(model)
    if config.validation_steps:
        check_continuation(num_frames, grid)
    parallelize(model, mesh)
    if config.compile:
        model.compile_repeated_blocks(fullgraph=True)
    scheduler = FlowMatchEulerDiscreteScheduler(NUM_TRAIN_TIMESTEPS, shift=config.flow_shift)

    # Optimisation.
    batches_a_step = config.gradient_accumulation_steps
    max_train_steps = config.max_train_steps or max(1, config.num_train_epochs * len(loader) // batches_a_step)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.adam_weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    ema = EMAModel(model.parameters(), decay=config.ema_decay) if config.use_ema else None
    if ema is not None:
        ema.to(accelerator.device)

    # Where an earlier run stopped.
    global_batch = config.train_batch_size * dp_size * batches_a_step
    state = RunState(accelerator, bare(model), optimizer.optimizer, ema)
    checkpoints = Checkpoints(
        Path(config.output_dir),
        ranks,
        state,
        limit=config.checkpoints_total_limit,
        config=config,
        layout={"global_batch": global_batch, "num_processes": ranks.size, **describe_model(bare(model))},
    )
    steps_done = 0
    ranks.doing("resuming", alone=True)
    if checkpoint := checkpoints.find(config.resume_from_checkpoint):
        steps_done = checkpoints.load(checkpoint)
        logger.info(f"Resumed from {checkpoint}")
        if steps_done > max_train_steps:
            raise ValueError(f"{checkpoint} has {steps_done} steps, more than the {max_train_steps} to be trained")
    # A schedule that accelerate prepares would run num_processes times too fast.
    lr_scheduler = build_schedule(config, optimizer, max_train_steps, state.steps_of_schedule)
    metrics = start_logs(config, accelerator, steps_done)

    # Training.
    logger.info(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {len(dataset)} clips of {num_frames} "
        f"latent frames, {dp_size} data-parallel groups of {config.cp_size} ranks with {frames_per_rank} frames, "
        f"global batch {global_batch}, steps {steps_done} to {max_train_steps}"
    )
    batches = endless_batches(loader, dataset, start=steps_done * batches_a_step)
    steps = range(steps_done + 1, max_train_steps + 1)
    skipped_steps = 0
    model.train()
    stop.training = True
    progress = tqdm(steps, "Steps", initial=steps_done, total=max_train_steps, disable=not accelerator.is_main_process)
    for step in progress:
        started = time.perf_counter()
        clips: list[list[str]] = []
        losses: list[Tensor] = []
        for batch_number in range((step - 1) * batches_a_step, step * batches_a_step):
            ranks.doing(f"step {step}, batch {batch_number % batches_a_step}")
            # A sample's number in the run, which is the same however samples are dealt to ranks.
            first_sample = (batch_number * dp_size + dp_rank) * config.train_batch_size
            sample_ids = list(range(first_sample, first_sample + config.train_batch_size))
            with accelerator.accumulate(model):
                batch = next(batches)
                noise = sample_noise(config, shape, sample_ids, config.seed, **grid.facts)
                share = clip_loss(model, batch, noise, own_frames, frames_per_rank, config)
                # Gradients are averaged over all ranks, but those of a clip's frames are to be summed.
                batch_loss = share * config.cp_size
                accelerator.backward(batch_loss)
                clips.append(batch["clip"])
                losses.append(batch_loss.detach())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
                    seen = look_at(accelerator, losses, norm, stop.code)  # before the optimizer moves anything
                    stop_if_diverged(accelerator, seen, skipped_steps, clips, losses, f"step {step}")
                    checkpoints.prune()  # the newest one gave this step
                optimizer.step()
                optimizer.zero_grad()
        learning_rate = lr_scheduler.get_last_lr()[0]
        if accelerator.optimizer_step_was_skipped:  # by fp16's loss scaling
            skipped_steps += 1
        else:
            skipped_steps = 0
            lr_scheduler.step()
            state.steps_of_schedule += 1
            if ema is not None:
                ema.step(model.parameters())

        values = {
            "loss": seen.loss,
            "grad_norm": seen.grad_norm,
            "lr": learning_rate,
            "frames_per_second": global_batch * num_frames / (time.perf_counter() - started),
            "memory": peak_memory(accelerator.device),
        }
        is_last, exit_code = step == max_train_steps, seen.exit_code
        if config.validation_steps and (step % config.validation_steps == 0 or is_last):
            ranks.doing(f"step {step}, validation", alone=True)
            values |= validate(accelerator, model, ema, ranks, stop, scheduler, dataset, config)
            exit_code = ranks.on_main(lambda: stop.code) if exit_code is None else exit_code
        if metrics is not None:
            metrics.write(step=step, **values)
        accelerator.log(values, step=step)
        progress.set_postfix(loss=f"{values['loss']:.3f}", lr=f"{learning_rate:.2e}", refresh=False)
        is_stopped = exit_code is not None and not is_last
        if step % config.checkpointing_steps == 0 or is_last or is_stopped:
            ranks.doing(f"step {step}, checkpoint", alone=True)
            if metrics is not None:
                metrics.flush()
            checkpoints.save(step)
        if is_stopped:
            stop.code = exit_code  # on the ranks that no signal reached, too
            logger.info(f"Asked to end: checkpoint-{step} is written")
            break
    else:
        ranks.doing("saving the model", alone=True)
        trained = trained_copy(accelerator, model, ema, config)
        ranks.on_main(partial(save_model, trained, scheduler, dataset, config))
    checkpoints.prune()


def clip_loss(
    model: nn.Module,
    batch: dict[str, Tensor],
    noise: Noise,
    own_frames: slice,
    frames_per_rank: list[int],
    config: TrainConfig,
) -> Tensor:
    """This rank's share of the batch's mean loss; the shares of a context-parallel group add up to it.

    Args:
        batch: "latents" (B, C, T, h, w) of whole clips; for a model that reads text "prompt_embeds" (B, L, E) and
            "prompt_attention_mask" (B, L); for SANA-WM the camera's "camera_conditions" and "chunk_plucker".
        noise: of whole clips.
        own_frames: the latent frames that this rank computes, of all `sum(frames_per_rank)`.
    """
    latents = batch["latents"].to(getattr(torch, config.weight_dtype))
    noised_frames = (noise.sigmas > 0).sum(dim=1).to(latents.device)
    latents, noise, sigmas = latents[:, :, own_frames], noise.noise[:, :, own_frames], noise.sigmas[:, own_frames]
    noise, sigmas = noise.to(latents), sigmas.to(latents)
    inputs = model_inputs(
        bare(model),
        add_noise(latents, noise, sigmas),
        sigmas * NUM_TRAIN_TIMESTEPS,
        batch,
        own_frames,
        frames_per_rank,
    )
    prediction = model(**inputs).sample
    return flow_loss(
        prediction, latents, noise, sigmas, prediction_type=config.prediction_type, noised_frames=noised_frames
    )


def bare(model: nn.Module) -> nn.Module:
    """The model without what accelerate wraps it in."""
    return extract_model_from_parallel(model, keep_torch_compile=False)


def start_accelerator(config: TrainConfig) -> Accelerator:
    """accelerate's processes, or an error that gives the right command where it would start others than asked for."""
    output_dir = Path(config.output_dir)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=config.mixed_precision,
        log_with=None if config.report_to == "none" else config.report_to,
        project_config=ProjectConfiguration(str(output_dir), logging_dir=str(output_dir / config.logging_dir)),
        # Not at the end of an epoch too: the batch of every step is the same size.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.collective_timeout))],
    )
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    # DDP minds that gradients of depthwise convolutions come in channels_last, which costs it nothing here.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != world_size:
        raise ValueError(
            f"{world_size} processes were launched but accelerate joined {accelerator.num_processes}; "
            + how_to_launch(world_size)
        )
    if accelerator.num_processes % config.cp_size:
        raise ValueError(
            f"cp_size {config.cp_size} does not divide the {accelerator.num_processes} processes; "
            + how_to_launch(config.cp_size)
        )
    if config.report_to != "none" and not accelerator.log_with:
        raise ValueError(f"{config.report_to} is not installed: pip install it, or train with --report_to none")
    if accelerator.distributed_type not in DISTRIBUTED_TYPES:
        raise ValueError(
            f"train.py runs on one device, with DDP or with FSDP, not with {accelerator.distributed_type}"
        )
    if config.use_ema and accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("use_ema does not work with FSDP, whose checkpoints would hold one rank's average only")
    torch.backends.cuda.matmul.allow_tf32 = config.allow_tf32
    return accelerator


def how_to_launch(num_processes: int) -> str:
    return (
        f"launch with `accelerate launch --multi_gpu --num_processes {num_processes} train.py ...` "
        "(on a CPU too, where --cpu starts one process whatever --num_processes says)"
    )


def build_mesh(accelerator: Accelerator, config: TrainConfig) -> DeviceMesh | None:
    """The ranks as (data parallel, context parallel); None for a single process.

    The dimensions' names are those that accelerate's data loader reads.
    """
    if accelerator.num_processes == 1:
        return None
    shape = (accelerator.num_processes // config.cp_size, config.cp_size)
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
    for group in mesh.get_all_groups():  # which do not take the default group's limit
        _set_pg_timeout(timedelta(seconds=config.collective_timeout), group)
    return mesh


def build_model(config: TrainConfig, channels: int, dtype: torch.dtype) -> nn.Module:
    """The model with fresh or given weights: a VideoDiT, or a transformer of diffusers with GDN swapped in.

    Raises:
        ValueError: validation of a model that cannot be rolled out, and as `load_transformer`.
    """
    if config.pretrained_model_name_or_path:
        model = load_transformer(config.pretrained_model_name_or_path, dtype, config.model, config.swap)
    else:
        model = VideoDiT(**{"in_channels": channels, **config.model})
    if config.validation_steps and not (isinstance(model, VideoDiT) and model.config.chunk_frames):
        raise ValueError("validation_steps rolls out chunks: it needs a VideoDiT with chunk_frames")
    if config.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    return model.double() if dtype == torch.float64 else model


def check_alike(ranks: Ranks, dataset: VideoLatents) -> None:
    """Raises ValueError on all ranks where they see other clips: another folder, or one that is being encoded."""
    seen = ranks.gather([dataset.fingerprint(), len(dataset)])
    if any(other != seen[0] for other in seen):
        counts = ", ".join(str(count) for _, count in seen)
        raise ValueError(f"the ranks see other clips, {counts} of them by rank: all must read one folder, unchanged")


def build_loader(
    config: TrainConfig, dataset: VideoLatents, device: torch.device, mesh: DeviceMesh | None
) -> DataLoaderShard:
    """Shuffled batches, different ones on each data-parallel rank, in an order that depends on (seed, epoch) alone.

    Raises:
        ValueError: there are fewer clips than one batch on every rank.
    """
    loader = DataLoader(
        dataset,
        config.train_batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=config.dataloader_num_workers,
        worker_init_fn=ignore_signals_but_from_parent,
    )
    loader = prepare_data_loader(
        loader,
        device,
        torch_device_mesh=mesh,
        put_on_device=True,
        rng_types=["generator"],
        use_seedable_sampler=True,
        data_seed=config.seed,
    )
    if len(loader) == 0:
        raise ValueError(
            f"{len(dataset)} clips are too few for a batch on every data-parallel rank, "
            f"train_batch_size {config.train_batch_size} each"
        )
    return loader


def endless_batches(loader: DataLoaderShard, dataset: VideoLatents, start: int) -> Iterator[dict[str, Tensor]]:
    """The batches of epoch after epoch, from batch number `start` of the run on."""
    epoch, skipped = divmod(start, len(loader))
    while True:
        loader.set_epoch(epoch)
        dataset.set_epoch(epoch)  # accelerate forwards the epoch on some layouts only
        yield from skip_first_batches(loader, skipped)
        epoch, skipped = epoch + 1, 0


def start_logs(config: TrainConfig, accelerator: Accelerator, steps_done: int) -> Metrics | None:
    """Start the tracker; metrics.jsonl is the main process's, None on others."""
    flat = {name: value for name, value in asdict(config).items() if isinstance(value, (int, float, str))}
    accelerator.init_trackers("train", config=flat)
    if not accelerator.is_main_process:
        return None
    if config.report_to != "none" and not accelerator.trackers:
        raise ValueError(f"{config.report_to} did not start: train with --report_to none")
    output_dir = Path(config.output_dir)
    config.save(output_dir / "config.yaml")
    return Metrics(output_dir / "metrics.jsonl", steps_done)


def trained_copy(
    accelerator: Accelerator, model: nn.Module, ema: EMAModel | None, config: TrainConfig
) -> nn.Module | None:
    """The model as it is trained so far (its average, if one is kept), for one process: the main one, None on others.

    All ranks call this.
    """
    if ema is not None:
        ema.store(model.parameters())
        ema.copy_to(model.parameters())
    whole = accelerator.get_state_dict(bare(model))  # under FSDP from all ranks
    weights = {name: tensor.detach().cpu().clone() for name, tensor in whole.items() if accelerator.is_main_process}
    if ema is not None:
        ema.restore(model.parameters())
    return plain_copy(bare(model), weights, config.lora_rank) if accelerator.is_main_process else None


def validate(
    accelerator: Accelerator,
    model: nn.Module,
    ema: EMAModel | None,
    ranks: Ranks,
    stop: Stop,
    scheduler: FlowMatchEulerDiscreteScheduler,
    dataset: VideoLatents,
    config: TrainConfig,
) -> dict[str, float]:
    """Continue the first clip of the data: the psnr, and that of repeating the last given frame; {} if interrupted.

    The main process does it, with a copy of the model that is gone afterwards. All ranks call this and get the result.
    """
    trained = trained_copy(accelerator, model, ema, config)

    def scores() -> dict[str, float]:
        pipeline = FrameGDNRolloutPipeline(trained.to(accelerator.device), scheduler, config.prediction_type)
        pipeline.set_progress_bar_config(disable=True)
        steps, clip = config.validation_inference_steps, dataset[0]
        film = continue_clip(pipeline, clip, num_inference_steps=steps, seed=config.seed)
        codec = load_codec(dataset.codec, accelerator.device)
        num_given = 1 + codec.frame_ratio * (grid_of(trained).bounds(0)[1] - 1)
        psnr = continuation_psnr(codec.decode(film), codec.decode(clip["latents"]), num_given)
        return dict(zip(("psnr", "psnr_repeat_last"), psnr, strict=True))

    return ranks.on_main(lambda: stop.interruptible(scores, {}))


def save_model(
    trained: nn.Module, scheduler: FlowMatchEulerDiscreteScheduler, dataset: VideoLatents, config: TrainConfig
) -> None:
    """A folder as diffusers knows it, and `codec.json`: how latents become a video. rollout.py reads both."""
    output_dir = Path(config.output_dir)
    if isinstance(trained, VideoDiT) and trained.config.chunk_frames:
        FrameGDNRolloutPipeline(trained, scheduler, config.prediction_type).save_pretrained(output_dir)
    else:  # there is no pipeline that rolls it out
        trained.save_pretrained(output_dir / "transformer")
        scheduler.save_pretrained(output_dir / "scheduler")
    (output_dir / "codec.json").write_text(json.dumps(dataset.codec, indent=2) + "\n")
    for name in ("transformer", "scheduler"):
        flush_tree(output_dir / name)


def peak_memory(device: torch.device) -> float:
    """The most memory in GiB that this process has held: on its GPU, or in all where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says, and return the exit code."""
    config = parse_config(arguments, {"model": VideoDiT, "swap": SwapOptions, "data": VideoLatents})
    # torchrun, which also runs below `accelerate launch`, and accelerate for a single process.
    is_launched = bool({"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys())
    return main(config, __launcher__ if is_launched else None)


if __name__ == "__main__":
    sys.exit(run("train.py", command_line))
