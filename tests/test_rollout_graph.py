"""Passes of a rollout that are captured once and replayed: with a recorder of operations in place of a CUDA graph."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from frame_gdn import FrameGDNRolloutPipeline, RolloutState
from frame_gdn.rollout_graph import CapturedPasses
from tests.hosts.test_rollout import pipeline_of
from tests.models.helpers import tiny_inputs
from tests.test_rollout import image, prompt, tiny_pipeline

WINDOW = {"chunk_frames": 2, "first_chunk_frames": 3, "softmax_window": 2, "softmax_sink": True}

#: What a host asks a device for, or copies to it from memory that is not pinned: a capture cannot do either.
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.lift_fresh", "aten.masked_select")


class Recording(TorchDispatchMode):
    """Every operation with the tensors that it took and made. What it wrote in place outside gets back its values, as
    the memory of a capture does, which runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._made: set[int] = set()
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(str(func).startswith(name) for name in WAITS), f"{func} waits for the device"
        kwargs = kwargs or {}
        if str(func).startswith("aten.index_put"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), "a mask's indices are counted"
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and value.untyped_storage().data_ptr() not in self._made:
                self._before.append((value, value.clone()))
        out = func(*args, **kwargs)
        taken = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in taken:
                self._made.add(t.untyped_storage().data_ptr())
        self.calls.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        for tensor, before in reversed(self._before):
            tensor.copy_(before)

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """A `Capture` that counts what it captured."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        recording = Recording()
        with recording:
            result = function()
        recording.undo()
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                t.fill_(float("nan"))  # a capture computes nothing
        self.recordings.append(recording)
        return result, recording.replay


def captured(pipeline: FrameGDNRolloutPipeline) -> Recorder:
    """Replay a pipeline's passes from a recorder."""
    pipeline._capture = recorder = Recorder()
    return recorder


def same(a: RolloutState, b: RolloutState) -> bool:
    """Whether two states are equal to the bit."""
    ours, theirs = a.state_dict(), b.state_dict()
    about = ("frames", "chunks", "kept", "size", "rows", "facts")
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(ours[name], theirs[name]) for name in ours)
        and all(getattr(a, name) == getattr(b, name) for name in about)
    )


def rollouts(kind: str) -> tuple[FrameGDNRolloutPipeline, dict[str, Any]]:
    if kind == "video_dit":
        return tiny_pipeline(**WINDOW), {"first_frames": image(), "sigmas": [1.0, 0.5], **prompt()}
    pipeline, given = pipeline_of(kind)
    if kind == "sana_wm":
        frames = 8 * 17 + 1
        poses = torch.eye(4).repeat(2, frames, 1, 1)
        poses[..., 2, 3] = 0.1 * torch.arange(frames)
        given["camera"] = poses, torch.tensor([60.0, 60.0, 64.0, 64.0])
    return pipeline, given


@pytest.mark.parametrize("kind", ["video_dit", "sana_wm", "sana_video", "wan"])
def test_replayed_passes_equal_eager_ones_to_the_bit(kind: str) -> None:
    """Nothing that changes from chunk to chunk, position, camera, text, noise or state, stays in a recording."""
    pipeline, given = rollouts(kind)
    B, C, _, h, w = given["first_frames"].shape
    noise = torch.randn(B, C, 3 + 2 * 7, h, w, generator=torch.Generator().manual_seed(0))
    texts = [given["prompt_embeds"] * (1 + 0.1 * i) for i in range(8)]
    given = {**given, "latents": noise, "num_chunks": 8}
    given.pop("prompt_attention_mask", None)
    expected = pipeline(**{**given, "prompt_embeds": texts})
    recorder = captured(pipeline)
    found = pipeline(**{**given, "prompt_embeds": texts}, cuda_graph=True)
    assert torch.equal(found.latents, expected.latents) and same(found.state, expected.state)
    assert len(recorder.recordings) == 2, "one of a denoising pass, one of the commit"


def test_a_text_of_another_length_is_another_recording_and_few_are_kept() -> None:
    pipeline, given = rollouts("video_dit")
    text = given.pop("prompt_embeds")
    given.pop("prompt_attention_mask")
    texts = [text[:, : 1 + i % 4] for i in range(16)]
    noise = torch.randn(2, 3, 3 + 2 * 15, 4, 6, generator=torch.Generator().manual_seed(0))
    given = {**given, "latents": noise, "num_chunks": 16, "prompt_embeds": texts}
    expected = pipeline(**given)
    recorder = captured(pipeline)
    kept = []

    def look(pipe: Any, step: int, t: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept.append(len(pipe._passes._graphs))
        return {}

    found = pipeline(**given, cuda_graph=True, callback_on_step_end=look)
    assert torch.equal(found.latents, expected.latents) and same(found.state, expected.state)
    assert max(kept) == 3 and len(recorder.recordings) > 6


def test_a_state_that_was_given_or_taken_is_left_as_it_is() -> None:
    pipeline, given = rollouts("video_dit")
    noise = torch.randn(2, 3, 3 + 2 * 9, 4, 6, generator=torch.Generator().manual_seed(0))
    rest = {name: value for name, value in given.items() if name != "first_frames"}
    head = pipeline(num_chunks=5, latents=noise[:, :, :11], **given).state
    kept = head.clone()
    expected = [pipeline(num_chunks=n, latents=noise[:, :, 11 : 11 + 2 * n], state=head, **rest).state for n in (3, 5)]
    captured(pipeline)
    stream = pipeline.stream(num_chunks=5, latents=noise[:, :, 11:], state=head, cuda_graph=True, **rest)
    for _ in range(3):
        next(stream)
    branch = pipeline.state
    assert same(branch, expected[0]) and type(branch) is RolloutState
    for _ in stream:
        pass
    assert same(branch, expected[0]) and same(head, kept) and same(pipeline.state, expected[1])
    again = pipeline(num_chunks=2, latents=noise[:, :, 17:], state=branch, cuda_graph=True, **rest).state
    assert same(again, expected[1])


def test_a_failed_pass_leaves_the_last_committed_state() -> None:
    pipeline, given = rollouts("video_dit")
    captured(pipeline)
    noise = torch.randn(2, 3, 3 + 2 * 5, 4, 6, generator=torch.Generator().manual_seed(0))
    expected = pipeline(num_chunks=5, **{**given, "latents": noise[:, :, :11]}).state

    def fail(pipe: Any, step: int, t: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if pipe._passes.frames == 11:
            raise RuntimeError("stop")
        return {}

    with pytest.raises(RuntimeError, match="stop"):
        pipeline(num_chunks=6, latents=noise, cuda_graph=True, callback_on_step_end=fail, **given)
    assert same(pipeline.state, expected)


def test_what_cannot_be_captured_is_refused_by_name() -> None:
    pipeline, given = rollouts("video_dit")
    with pytest.raises(ValueError, match="cuda_graph=True captures what a GPU .* on cpu"):
        pipeline(**given, cuda_graph=True)
    with pytest.raises(ValueError, match="cuda_graph must be True or False, got 1"):
        pipeline.stream(**given, cuda_graph=1)
    endless = tiny_pipeline(**{**WINDOW, "softmax_window": None, "softmax_sink": False})
    captured(endless)
    with pytest.raises(ValueError, match="without softmax_window"):
        endless.stream(**given, cuda_graph=True)


def test_a_pass_that_reads_a_live_argument_would_be_noticed() -> None:
    """The recorder itself: what is not copied into a buffer stays as it was at the capture."""
    model = tiny_pipeline(**WINDOW).transformer
    inputs = tiny_inputs(2, torch.float32)
    with torch.no_grad():
        state = model(**tiny_inputs(7, torch.float32), output_state=True).state
        passes = CapturedPasses(model, replace(state, size=(4, 6)), Recorder())
        passes.commit(inputs)
        first, live = passes.predict(inputs), passes._graphs
        (graphs,) = live.values()
        graphs._arguments = inputs  # the replay goes on with the buffers that it recorded
        assert torch.equal(passes.predict({**inputs, "timestep": inputs["timestep"] / 2}), first)
