"""train.py over real processes: however clips are laid out and whenever it is killed, the run is the same."""

import gc
import json
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import train
from frame_gdn import parallelize
from models import VideoDiT
from tests.distributed.helpers import run_ranks
from tests.helpers import assert_every_gradient_says_something, fill_randomly
from training.checkpoints import read_metrics
from training.config import TrainConfig
from training.data import write_shard
from training.objective import sample_noise, split_frames
from training.ranks import RankError

CHANNELS, CHUNK = 192, 3  # channels of the Haar codec, since validation decodes


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight random clips of 6 and of 7 frames, and a model all of whose parameters are random."""
    folder = tmp_path_factory.mktemp("inputs")
    for num_frames in (6, 7):
        generator = torch.Generator().manual_seed(num_frames)
        clips = {f"clip{i}.latents": torch.randn(CHANNELS, num_frames, 4, 4, generator=generator) for i in range(8)}
        write_shard(folder / f"{num_frames}frames" / "clips.safetensors", clips, {"kind": "haar", "scale": 1.0})
    model = VideoDiT(
        in_channels=CHANNELS,
        patch_size=2,
        num_layers=2,
        softmax_every_n=2,
        num_attention_heads=2,
        attention_head_dim=12,
        ffn_expand_ratio=1.0,
        chunk_frames=CHUNK,
    )
    fill_randomly(model).save_pretrained(folder / "transformer")
    return folder


def options(inputs: Path, output_dir: Path, num_frames: int, **overrides: object) -> TrainConfig:
    values = {
        "pretrained_model_name_or_path": str(inputs),
        "data": {"shards": str(inputs / f"{num_frames}frames")},
        "output_dir": str(output_dir),
        "weight_dtype": "float64",
        "train_batch_size": 2,
        "max_train_steps": 20,
        "learning_rate": 1e-3,
        "lr_scheduler": "cosine",
        "prediction_type": "sample",
        "checkpointing_steps": 100,
        "report_to": "none",
    }
    return TrainConfig(**{**values, **overrides})


def as_if_launched(rank: int, world_size: int) -> None:
    """The environment in which accelerate finds the process group that this process is already in."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(MASTER_ADDR="localhost", OMP_NUM_THREADS="1")
    PartialState.destroy_process_group = lambda self, group=None: None  # the group is the test's


def run_training(rank: int, world_size: int, configs: list[TrainConfig]) -> None:
    """Several runs of train.py one after the other in the process group that this process is in."""
    as_if_launched(rank, world_size)
    for config in configs:
        train.main(config)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def losses_and_weights(output_dir: Path) -> tuple[Tensor, dict[str, Tensor]]:
    losses = torch.tensor([line["loss"] for line in read_metrics(output_dir / "metrics.jsonl")], dtype=torch.float64)
    return losses, load_file(output_dir / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.slow
def test_layouts_of_the_same_global_batch_are_the_same_run(inputs: Path, tmp_path: Path) -> None:
    """cp 1, cp 2 and 3 with even and uneven shards, cp 2 × dp 2, batch against accumulation; float64 and float32."""
    layouts = {  # name: (processes, frames, options)
        "cp1-even": (1, 6, {}),
        "cp1-uneven": (1, 7, {}),
        "cp1-even-accumulated": (1, 6, {"train_batch_size": 1, "gradient_accumulation_steps": 2}),
        "cp2-even": (2, 6, {"cp_size": 2, "gradient_checkpointing": True}),
        "cp2-uneven": (2, 7, {"cp_size": 2}),
        "dp2-uneven": (2, 7, {"train_batch_size": 1}),
        "cp3-uneven": (3, 7, {"cp_size": 3}),
        "cp2xdp2-even": (4, 6, {"cp_size": 2, "train_batch_size": 1}),
        "cp2xdp2-uneven": (4, 7, {"cp_size": 2, "train_batch_size": 1}),
        "cp1-single": (1, 7, {"weight_dtype": "float32"}),
        "cp2-single": (2, 7, {"cp_size": 2, "weight_dtype": "float32"}),
        "cp2xdp2-single": (4, 7, {"cp_size": 2, "train_batch_size": 1, "weight_dtype": "float32"}),
    }
    for world_size in (1, 2, 3, 4):
        configs = [
            options(inputs, tmp_path / name, num_frames, **overrides)
            for name, (processes, num_frames, overrides) in layouts.items()
            if processes == world_size
        ]
        run_ranks(world_size, run_training, configs)

    start = load_file(inputs / "transformer" / "diffusion_pytorch_model.safetensors")
    for name in layouts:
        kind = next(kind for kind in ("even", "uneven", "single") if kind in name.split("-"))
        losses, weights = losses_and_weights(tmp_path / name)
        expected_losses, expected_weights = losses_and_weights(tmp_path / f"cp1-{kind}")
        tolerance = 1e-4 if kind == "single" else 1e-9
        assert len(losses) == 20
        torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=0, msg=lambda m, n=name: f"{n}: {m}")
        if kind == "single":
            continue
        for key, weight in weights.items():
            assert weight.dtype == torch.float64
            assert not torch.equal(weight, start[key].double()), f"{key} was not trained"
            error = (weight - expected_weights[key]).norm() / expected_weights[key].norm()
            assert error < tolerance, f"{name}: {key} differs by {error}"


def test_every_parameter_has_a_gradient(inputs: Path, tmp_path: Path) -> None:
    config = options(inputs, tmp_path, 7)
    model = train.build_model(config, CHANNELS, torch.float64)
    batch = {"latents": torch.randn(2, CHANNELS, 7, 4, 4)}
    noise = sample_noise(config, (CHANNELS, 7, 4, 4), [0, 1], seed=0, chunk_frames=CHUNK)
    train.clip_loss(model, batch, noise, slice(0, 7), [7], config).backward()
    assert_every_gradient_says_something(model)


def train_sharded(rank: int, world_size: int, config: TrainConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Five steps at cp 2 with weights sharded over all ranks by FSDP2; each data-parallel group has its own clip."""
    num_frames, dp_size = 7, max(1, world_size // 2)
    frames_per_rank = split_frames(num_frames, 2 if world_size > 1 else 1)
    model = train.build_model(config, CHANNELS, torch.float64)
    cp_rank = 0
    if world_size > 1:
        mesh = init_device_mesh("cpu", (dp_size, 2), mesh_dim_names=("dp_replicate", "cp"))
        cp_rank = mesh.get_local_rank("cp")
        parallelize(model, mesh)
        shards = init_device_mesh("cpu", (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=shards)
        fully_shard(model, mesh=shards)
    first = sum(frames_per_rank[:cp_rank])
    own_frames = slice(first, first + frames_per_rank[cp_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clips = torch.randn(5, 2, CHANNELS, num_frames, 4, 4, generator=torch.Generator().manual_seed(0))
    losses = []
    for step, batch in enumerate(clips):
        clip_ids = [0, 1] if world_size == 1 else [rank // 2]
        sample_ids = [2 * step + i for i in clip_ids]
        noise = sample_noise(config, batch.shape[1:], sample_ids, seed=0, chunk_frames=CHUNK)
        share = train.clip_loss(model, {"latents": batch[clip_ids]}, noise, own_frames, frames_per_rank, config)
        loss = share * len(frames_per_rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if world_size > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
    weights = dict(model.named_parameters())
    whole = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}
    return losses, {name: w.detach().clone() for name, w in whole.items()}


def test_sharded_weights_beside_the_context_parallel_mesh_are_the_same_run(inputs: Path, tmp_path: Path) -> None:
    config = options(inputs, tmp_path, 7)
    losses, weights = train_sharded(0, 1, config)
    for sharded_losses, sharded_weights in run_ranks(4, train_sharded, config):
        assert sharded_losses == pytest.approx(losses, rel=1e-9)
        for name, weight in sharded_weights.items():
            assert (weight - weights[name]).norm() < 1e-9 * weights[name].norm(), name


def launch(*arguments: str, how: str = "--multi_gpu") -> subprocess.Popen[str]:
    flags = [how, "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, "--main_process_port=0"]
    return subprocess.Popen(
        [*command, "train.py", *arguments],
        cwd=Path(train.__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_bit(inputs: Path, tmp_path: Path) -> None:
    """Killed while it writes its second checkpoint, across epochs, with accumulation, an average and validation on."""
    arguments = {}
    for name in ("whole", "killed"):
        config = options(
            inputs,
            tmp_path / name,
            7,
            weight_dtype="float32",
            cp_size=2,
            train_batch_size=1,
            gradient_accumulation_steps=3,
            max_train_steps=40,
            checkpointing_steps=8,
            checkpoints_total_limit=2,
            use_ema=True,
            validation_steps=20,
            validation_inference_steps=2,
            report_to="tensorboard",
        )
        config.save(tmp_path / f"{name}.yaml")
        arguments[name] = ["--config", str(tmp_path / f"{name}.yaml")]

    whole, _ = (process := launch(*arguments["whole"])).communicate(timeout=200)
    assert process.returncode == 0, whole

    process = launch(*arguments["killed"])
    while not (tmp_path / "killed" / ".partial-checkpoint-16").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    for victim in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        victim.kill()
    process.communicate(timeout=60)
    assert not (tmp_path / "killed" / "checkpoint-24").exists()
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # as a kill within a write would leave it

    resumed, _ = (process := launch(*arguments["killed"], "--resume_from_checkpoint=latest")).communicate(timeout=200)
    assert process.returncode == 0, resumed

    lines = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in arguments}
    for key in ("step", "loss", "grad_norm", "lr", "psnr", "psnr_repeat_last"):
        assert [line.get(key) for line in lines["killed"]] == [line.get(key) for line in lines["whole"]]
    assert [line["step"] for line in lines["whole"] if "psnr" in line] == [20, 40]
    assert [line["step"] for line in lines["whole"]] == list(range(1, 41))
    assert set(lines["whole"][0]) == {"step", "loss", "grad_norm", "lr", "frames_per_second", "memory"}
    for name in ("transformer/diffusion_pytorch_model.safetensors", "checkpoint-40/model.safetensors"):
        weights, expected = load_file(tmp_path / "killed" / name), load_file(tmp_path / "whole" / name)
        assert all(torch.equal(weights[key], expected[key]) for key in expected | weights)
    for name in arguments:
        assert sorted(path.name for path in (tmp_path / name).glob("*checkpoint*")) == [
            "checkpoint-32",
            "checkpoint-40",
        ]
        assert list((tmp_path / name / "logs").rglob("events.out.tfevents.*"))
        assert json.loads((tmp_path / name / "codec.json").read_text())["kind"] == "haar"


@pytest.mark.parametrize(
    "how, argument, message",
    [
        ("--multi_gpu", "--cp_size=3", "cp_size 3 does not divide the 2 processes.*--multi_gpu --num_processes 3"),
        ("--cpu", "--cp_size=2", "cp_size 2 does not divide the 1 processes.*--multi_gpu --num_processes 2"),
        ("--multi_gpu", "--lerning_rate=3", "unknown option 'lerning_rate'; did you mean 'learning_rate'"),
    ],
    ids=["cp_size", "one-process-instead-of-two", "option"],
)
def test_mistakes_end_in_an_error_that_says_what_to_do(
    inputs: Path, tmp_path: Path, how: str, argument: str, message: str
) -> None:
    options(inputs, tmp_path / "out", 7).save(tmp_path / "run.yaml")
    process = launch("--config", str(tmp_path / "run.yaml"), argument, how=how)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert re.search(message, output), output


def too_many_ranks(rank: int, world_size: int, config: TrainConfig) -> str:
    as_if_launched(rank, world_size)
    with pytest.raises(ValueError, match="cp_size 2 is more than the 1 latent frames") as error:
        train.main(config)
    return str(error.value)


def test_more_ranks_than_frames_is_an_error_on_every_rank(inputs: Path, tmp_path: Path) -> None:
    write_shard(
        tmp_path / "short" / "clips.safetensors",
        {"clip.latents": torch.zeros(CHANNELS, 1, 4, 4)},
        {"kind": "haar", "scale": 1.0},
    )
    config = options(inputs, tmp_path / "out", 7, cp_size=2, data={"shards": str(tmp_path / "short")})
    assert len(set(run_ranks(2, too_many_ranks, config))) == 1


def diverge(rank: int, world_size: int, config: TrainConfig) -> str:
    as_if_launched(rank, world_size)
    with pytest.raises(FloatingPointError, match="step [34]: the loss is nan.* clips: broken$") as error:
        train.main(config)
    return str(error.value)


def test_a_run_that_diverges_stops_on_every_rank_and_keeps_its_checkpoint(inputs: Path, tmp_path: Path) -> None:
    """One value of one clip is NaN, in the second rank's frames."""
    clips = {f"clip{i}.latents": torch.randn(CHANNELS, 6, 4, 4) for i in range(3)}
    clips["broken.latents"] = torch.randn(CHANNELS, 6, 4, 4)
    clips["broken.latents"][0, 5, 0, 0] = float("nan")
    write_shard(tmp_path / "data" / "clips.safetensors", clips, {"kind": "haar", "scale": 1.0})
    config = options(
        inputs,
        tmp_path / "out",
        6,
        cp_size=2,
        train_batch_size=1,
        checkpointing_steps=1,
        checkpoints_total_limit=1,
        data={"shards": str(tmp_path / "data")},
        seed=1,
    )
    (message,) = set(run_ranks(2, diverge, config))
    last = int(re.match(r"step (\d)", message)[1]) - 1
    losses = [line["loss"] for line in read_metrics(tmp_path / "out" / "metrics.jsonl")]
    assert len(losses) == last and torch.tensor(losses).isfinite().all()
    # The one before stays too: nobody knows whether the weights of the last one are at fault.
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {
        f"checkpoint-{last - 1}",
        f"checkpoint-{last}",
    }
    assert all(
        t.isfinite().all() for t in load_file(tmp_path / "out" / f"checkpoint-{last}" / "model.safetensors").values()
    )
    assert not (tmp_path / "out" / "transformer").exists()


def train_compiled(rank: int, world_size: int, config: TrainConfig) -> None:
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "EAGER"  # as `accelerate launch --dynamo_backend eager` does
    run_training(rank, world_size, [config])


@pytest.mark.slow
def test_a_model_that_accelerate_compiles_is_the_same_run(inputs: Path, tmp_path: Path) -> None:
    shared = {"max_train_steps": 2, "use_ema": True, "validation_steps": 2, "validation_inference_steps": 1}
    run_ranks(1, train_compiled, options(inputs, tmp_path / "compiled", 6, **shared))
    run_ranks(1, run_training, [options(inputs, tmp_path / "plain", 6, **shared)])
    (losses, weights), (expected_losses, expected) = (losses_and_weights(tmp_path / n) for n in ("compiled", "plain"))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=0)
    assert weights.keys() == expected.keys()


def train_with_compiled_blocks(rank: int, world_size: int, configs: list[TrainConfig]) -> None:
    """With dynamo's graphs run as they are, which spares the compiler of C++."""
    compiling = VideoDiT.compile_repeated_blocks
    VideoDiT.compile_repeated_blocks = lambda model, **options: compiling(model, **options, backend="eager")
    run_training(rank, world_size, configs)


@pytest.mark.slow
def test_compiled_blocks_are_the_same_run(inputs: Path, tmp_path: Path) -> None:
    runs = {name: options(inputs, tmp_path / name, 6, max_train_steps=2, compile=name == "compiled",
                          gradient_checkpointing=True) for name in ("compiled", "plain")}  # fmt: skip
    run_ranks(2, train_with_compiled_blocks, list(runs.values()), timeout_s=200)
    (losses, weights), (expected_losses, expected) = (losses_and_weights(tmp_path / name) for name in runs)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=0)
    assert weights.keys() == expected.keys()


def copies_alive(rank: int, world_size: int, config: TrainConfig) -> list[int]:
    """How many models that a validation made are alive at each step's loss, without a garbage collection."""
    made, alive = [], []
    plain_copy, clip_loss = train.plain_copy, train.clip_loss

    def copying(*arguments: object) -> torch.nn.Module:
        made.append(weakref.ref(model := plain_copy(*arguments)))
        return model

    def losing(*arguments: object) -> Tensor:
        alive.append(sum(reference() is not None for reference in made))
        return clip_loss(*arguments)

    train.plain_copy, train.clip_loss = copying, losing
    gc.disable()
    run_training(rank, world_size, [config])
    assert len(made) == 4  # three validations and what is saved
    return alive


def test_a_validation_leaves_no_copy_of_the_model(inputs: Path, tmp_path: Path) -> None:
    config = options(inputs, tmp_path, 6, max_train_steps=3, validation_steps=1, validation_inference_steps=1)
    assert run_ranks(1, copies_alive, config) == [[0, 0, 0]]


def test_a_clip_of_one_chunk_is_refused_before_it_is_validated(inputs: Path, tmp_path: Path) -> None:
    clips = {f"clip{i}.latents": torch.zeros(CHANNELS, CHUNK + 2, 4, 4) for i in range(2)}
    write_shard(tmp_path / "data" / "clips.safetensors", clips, {"kind": "haar", "scale": 1.0})
    config = options(inputs, tmp_path / "out", 6, validation_steps=1, data={"shards": str(tmp_path / "data")})
    with pytest.raises(AssertionError, match="ValueError: .*a clip of 5 latent frames has no second one of 3"):
        run_ranks(1, run_training, [config])


def train_beside_slow_ranks(rank: int, world_size: int, config: TrainConfig) -> None:
    """The main process takes longer to read the data and to validate than a collective may wait."""
    data, continuation = train.VideoLatents, train.continue_clip

    def slowly(function: Callable[..., object]) -> Callable[..., object]:
        def slow(*args: object, **kwargs: object) -> object:
            time.sleep(2.5 * config.collective_timeout if rank == 0 else 0)
            return function(*args, **kwargs)

        return slow

    train.VideoLatents, train.continue_clip = slowly(data), slowly(continuation)
    run_training(rank, world_size, [config])


def test_a_rank_may_encode_and_validate_for_longer_than_a_collective_waits(inputs: Path, tmp_path: Path) -> None:
    config = options(
        inputs,
        tmp_path,
        6,
        cp_size=2,
        max_train_steps=1,
        validation_steps=1,
        validation_inference_steps=1,
        collective_timeout=2,
    )
    run_ranks(2, train_beside_slow_ranks, config)
    assert "psnr" in read_metrics(tmp_path / "metrics.jsonl")[0]


def fail_on_one_rank(rank: int, world_size: int, config: TrainConfig) -> str:
    clip_loss, calls = train.clip_loss, []

    def failing(*arguments: object) -> Tensor:
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise ValueError("the second step is too much for me")
        return clip_loss(*arguments)

    train.clip_loss = failing
    as_if_launched(rank, world_size)
    with pytest.raises((ValueError, RankError)) as error:
        train.main(config)
    return f"{type(error.value).__name__}: {error.value}"


def test_a_rank_that_fails_is_named_by_the_others_with_its_error(inputs: Path, tmp_path: Path) -> None:
    config = options(inputs, tmp_path, 6, cp_size=2, collective_timeout=20)
    other, own = run_ranks(2, fail_on_one_rank, config)
    assert own == "ValueError: the second step is too much for me"
    failed = "ended: ValueError: the second step is too much for me; last seen in step 2, batch 0"
    line = r"for \d+ s, at tests/distributed/test_train.py:\d+ failing"
    assert re.match(rf"RankError: the ranks:\n  rank 1 \(process \d+ on .*\) {failed} {line}", other), other
    assert "which ended this rank's collective" in other
