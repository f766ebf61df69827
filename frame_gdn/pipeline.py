"""`FrameGDNRolloutPipeline`: a video as long as one wants, chunk after chunk."""

from . import needs_diffusers as needs_diffusers  # isort: skip

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin, SchedulerMixin
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from . import checks
from .chunks import ChunkGrid
from .parallel import FrameSharded, rank_and_size
from .rollout_call import CameraChunks, EachChunk, arguments_of, camera_of, takes_camera
from .rollout_graph import Capture, CudaGraphs, Passes, check_bounded, check_capturable, passes_of
from .rollout_state import RolloutState, facts_of

PREDICTION_TYPES = ("velocity", "sample")

#: Steps of the scheduler a chunk, unless they or sigmas are given.
DEFAULT_STEPS = 20

Text = Tensor | Sequence[Any] | Iterator[Any]
Callback = Callable[[Any, int, Tensor, dict[str, Any]], dict[str, Any] | None]


@dataclass
class RolloutOutput(BaseOutput):  # type: ignore[misc]
    """`latents` (B, C, T, h, w): the chunks that were made, given whole chunks not among them; `state` after them, to
    go on from."""

    latents: Tensor
    state: RolloutState | None = None


@dataclass(frozen=True)
class _Rollout:
    """What one call was asked for, checked.

    Attributes:
        shape: (B, C, h, w) of the latents; dtype: what they are denoised in, float32 at least.
        prefix: whole chunks to commit before the first one, or None; `pinned` frames that the clip's first chunk
            begins with, or None.
        text, negative, camera: what each chunk is conditioned on; None without.
        noise: what all chunks start from, or None to draw it.
        passes: the model with the state, eager or as CUDA graphs.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    num_chunks: int | None
    prefix: Tensor | None
    pinned: Tensor | None
    text: EachChunk | None
    negative: tuple[Tensor, Tensor | None] | None
    camera: CameraChunks | None
    generator: torch.Generator | list[torch.Generator] | None
    noise: Tensor | None
    passes: Passes
    callback: Callback | None
    callback_tensors: Sequence[str]


class FrameGDNRolloutPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Make a clip chunk by chunk: each new chunk is denoised in view of all that came before, through a state.

    The state is made by clean frames alone: a finished chunk passes the model once more, at timestep 0, before it is
    returned. So every step equals a pass over [all clean chunks, the noisy chunk] with per-frame timesteps.

    Args:
        transformer: a chunk-causal model (config.chunk_frames is set): `models.VideoDiT`, a swapped transformer of
            diffusers, or one that is called as the former: `transformer(latents, timestep (B, T), ..., state=,
            output_state=)` with `.sample` and `.state`.
        scheduler: flow matching; a level sigma mixes (1 - sigma) · clip + sigma · noise.
        prediction_type: what the model was trained to predict, "velocity" (noise - clip) or "sample" (the clean clip).

    Attributes:
        state: the state after the last finished chunk of the last call, also where that call ended in an error.
        interrupt: set to True, in a callback say, it ends the call after the present step; the chunk is dropped.
        num_timesteps: steps a chunk of the last call.

    Raises:
        ValueError: a model that is not chunk-causal, a scheduler that is not flow matching, another prediction_type.
    """

    model_cpu_offload_seq = "transformer"
    _callback_tensor_inputs = ["latents", "prompt_embeds", "negative_prompt_embeds"]

    def __init__(
        self, transformer: ModelMixin, scheduler: FlowMatchEulerDiscreteScheduler, prediction_type: str = "velocity"
    ) -> None:
        super().__init__()
        checks.choice("prediction_type", prediction_type, PREDICTION_TYPES)
        if not isinstance(transformer, nn.Module) or not hasattr(transformer, "config"):
            raise ValueError(f"transformer must be a model of diffusers' kind, got {checks.shown(transformer)}")
        config: Any = transformer.config
        if not config.get("chunk_frames"):
            raise ValueError(
                f"a rollout needs a chunk-causal model: the transformer's config.chunk_frames is not set "
                f"in this {type(transformer).__name__}"
            )
        if not is_flow_matching(scheduler):
            raise ValueError(
                f"scheduler must be a flow-matching one such as FlowMatchEulerDiscreteScheduler, "
                f"got {checks.shown(scheduler)}"
            )
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.register_to_config(prediction_type=prediction_type)
        self._passes = Passes(transformer, None)
        self._capture: Capture | None = None  # a test's, in place of CUDA graphs
        self._interrupt, self._num_timesteps, self._guidance_scale = False, 0, 1.0

    @property
    def state(self) -> RolloutState | None:
        return self._passes.state

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    @property
    def guidance_scale(self) -> float:
        """That of the last call; 1.0 is off."""
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale != 1.0

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    @interrupt.setter
    def interrupt(self, value: bool) -> None:
        checks.flag("interrupt", value)
        self._interrupt = value

    @torch.no_grad()
    def __call__(
        self,
        first_frames: Tensor | None = None,
        num_chunks: int = 1,
        num_inference_steps: int | None = DEFAULT_STEPS,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Text | None = None,
        prompt_attention_mask: Tensor | None = None,
        *,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        camera: Any = None,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 1.0,
        latents: Tensor | None = None,
        state: RolloutState | None = None,
        output_type: str = "latent",
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        cuda_graph: bool = False,
    ) -> RolloutOutput | tuple[Tensor, RolloutState | None]:
        """The next `num_chunks` chunks of a clip at once, fewer where it is interrupted; arguments and errors as
        `stream`.

        Args:
            output_type: "latent" alone: decode them with the model's own VAE, or `frame_gdn.decoding` as they come.
            return_dict: False returns (latents, state).
        """
        checks.integer("num_chunks", num_chunks, 1)
        checks.choice("output_type", output_type, ("latent",))
        checks.flag("return_dict", return_dict)
        stream = self.stream(
            first_frames, num_chunks, num_inference_steps, generator, prompt_embeds, prompt_attention_mask,
            negative_prompt_embeds=negative_prompt_embeds,
            negative_prompt_attention_mask=negative_prompt_attention_mask, camera=camera, sigmas=sigmas,
            guidance_scale=guidance_scale, latents=latents, state=state, callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs, cuda_graph=cuda_graph,
        )  # fmt: skip
        chunks, shape = [], self._shape
        with self.progress_bar(total=num_chunks) as progress:
            for chunk in stream:
                chunks.append(chunk)
                progress.update()
        B, C, h, w = shape
        made = torch.cat(chunks, dim=2) if chunks else torch.empty(B, C, 0, h, w, device=self._execution_device)
        return RolloutOutput(made, self.state) if return_dict else (made, self.state)

    def stream(
        self,
        first_frames: Tensor | None = None,
        num_chunks: int | None = None,
        num_inference_steps: int | None = DEFAULT_STEPS,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Text | None = None,
        prompt_attention_mask: Tensor | None = None,
        *,
        negative_prompt_embeds: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        camera: Any = None,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 1.0,
        latents: Tensor | None = None,
        state: RolloutState | None = None,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        cuda_graph: bool = False,
    ) -> Iterator[Tensor]:
        """The next chunks (B, C, T of the chunk, h, w) of a clip, each as soon as it is clean and in `state`.

        Args:
            first_frames: (B, C, T, h, w) clean latents. A whole number of chunks is what the film goes on from; fewer
                than the first chunk's frames, an image say, stay as they are, at level 0, at the beginning of the
                first chunk that is made. After a `state`: None, or a whole number of further chunks.
            num_chunks: how many; None goes on without end.
            num_inference_steps: steps of the scheduler a chunk, unless there are sigmas.
            generator: draws each chunk's noise when its turn comes, so that the first chunks of a long rollout are
                those of a short one.
            prompt_embeds: for a model that reads text: (B, L, E); or by chunk, a sequence or an iterator, which is
                asked when a chunk begins, of such tensors or of pairs with a mask (B, L).
            prompt_attention_mask: (B, L), True where the text is no padding, beside a tensor.
            negative_prompt_embeds, negative_prompt_attention_mask: the same of what guidance leads away from.
            camera: for SANA-WM: (poses, intrinsics) of the film from its first frame on, as `frame_gdn.camera`; or by
                chunk, a sequence or an iterator of such pairs; or a `CameraStream`, which stands where the state does.
            sigmas: the noise levels of a chunk's steps, falling, from (0, 1], without the 0 at their end.
            guidance_scale: of classifier-free guidance; 1.0 is off. Both rows are in one batch and in the state.
            latents: (B, C, T, h, w) noise of all chunks that are made, in place of what `generator` draws.
            state: go on from here; it is left as it is.
            callback_on_step_end: called as (pipeline, step, timestep, tensors) after every step of a chunk; what it
                returns under "latents" takes their place.
            callback_on_step_end_tensor_inputs: names of the tensors that it is given.
            cuda_graph: replay the model's passes from CUDA graphs, to the same numbers: one launch in place of some
                thousand. Eager are the first chunk, those before the window of softmax attention is full, and the
                first one of other shapes (a text of another length). Each look at `state` is then a copy.

        Raises:
            ValueError: before anything is computed, first frames that are neither whole chunks nor fewer than the
                first, a text, camera, noise or state that does not fit the model or one another, sigmas that do not
                fall, and whatever is out of its range.
        """
        checks.integer("num_chunks", num_chunks, 1, optional=True)
        checks.number("guidance_scale", guidance_scale, 0)
        steps = self._check_steps(num_inference_steps, sigmas)
        for module in self.transformer.modules():
            if isinstance(module, FrameSharded) and rank_and_size(module.group)[1] > 1:
                raise ValueError(
                    "transformer: its frames are sharded over a group, a rollout makes each chunk in one process: "
                    "call frame_gdn.parallelize(transformer, None) first"
                )
        guided = guidance_scale != 1.0
        prefix, pinned, shape = self._check_frames(first_frames, latents, state, guided)
        batch = shape[0]
        check_generator(generator, batch)
        grid = ChunkGrid.of(self.transformer.config)
        consumed = (0 if state is None else state.frames) + (0 if prefix is None else prefix.shape[2])
        noise = self._check_noise(latents, shape, grid, consumed, num_chunks)
        text = self._check_text(prompt_embeds, prompt_attention_mask, batch, num_chunks)
        negative = self._check_negative(negative_prompt_embeds, negative_prompt_attention_mask, batch, guided)
        if camera is not None and not takes_camera(self.transformer):
            raise ValueError(f"camera is for SANA-WM, the transformer is a {type(self.transformer).__name__}")
        views = None
        if camera is not None:
            before = 0 if state is None else state.frames
            end = None if num_chunks is None else grid.bounds(grid.index(consumed) + num_chunks - 1)[1]
            views = CameraChunks(camera, shape[2:], before, end)
        if callback_on_step_end is not None and not callable(callback_on_step_end):
            raise ValueError(f"callback_on_step_end must be callable, got {checks.shown(callback_on_step_end)}")
        unknown = [name for name in callback_on_step_end_tensor_inputs if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs must be of {self._callback_tensor_inputs}, got {unknown}"
            )
        given = first_frames if first_frames is not None else latents
        dtype = self.transformer.dtype if given is None else given.dtype
        capture = self._check_capture(cuda_graph)
        self._shape, self._interrupt = shape, False
        self._passes = passes_of(self.transformer, state, capture)
        self._guidance_scale = float(guidance_scale)
        return self._chunks(
            _Rollout(
                shape, torch.promote_types(dtype, torch.float32), num_chunks, prefix,
                pinned, text, negative, views, generator, noise, self._passes,
                callback_on_step_end, tuple(callback_on_step_end_tensor_inputs),
            ),
            steps,
        )  # fmt: skip

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check_steps(self, num_inference_steps: int | None, sigmas: Sequence[float] | None) -> dict[str, Any]:
        """The scheduler's arguments."""
        most = self.scheduler.config.num_train_timesteps
        checks.integer("num_inference_steps", num_inference_steps, 1, most, optional=sigmas is not None)
        if sigmas is None:
            return {"num_inference_steps": num_inference_steps}
        values = sigmas.tolist() if hasattr(sigmas, "tolist") else sigmas
        if not isinstance(values, (list, tuple)) or not values:
            raise ValueError(f"sigmas must be a list of numbers, got {checks.shown(sigmas)}")
        for value in values:
            checks.number("sigmas' each", value, 0, above=True)
        if max(values) > 1 or any(a <= b for a, b in zip(values, values[1:], strict=False)):
            raise ValueError(f"sigmas must fall, from 1 at most to above 0, got {checks.shown(sigmas)}")
        return {"sigmas": [float(value) for value in values]}

    def _check_capture(self, cuda_graph: bool) -> Capture | None:
        """What makes graphs of the passes; None where they are called."""
        checks.flag("cuda_graph", cuda_graph)
        if not cuda_graph:
            return None
        if self._capture is None:
            check_capturable(self.transformer, self._execution_device)
            return CudaGraphs()
        check_bounded(self.transformer)
        return self._capture

    def _check_frames(
        self, first_frames: Tensor | None, latents: Tensor | None, state: RolloutState | None, guided: bool
    ) -> tuple[Tensor | None, Tensor | None, tuple[int, int, int, int]]:
        """Whole given chunks, frames to be pinned, and the latents' (B, C, h, w)."""
        config, device = self.transformer.config, self._execution_device
        grid, channels = ChunkGrid.of(config), config.get("in_channels", "C")
        if state is not None:
            self._check_state(state, guided)
            grid = grid.after("state", state.frames)
        if first_frames is None:
            if latents is not None:
                checks.tensor("latents", latents, ("B", channels, "T", "h", "w"))
                return None, None, (*latents.shape[:2], *latents.shape[3:])
            if state is None or state.size is None or not isinstance(channels, int):
                raise ValueError(
                    f"first_frames must be (B, {channels}, T, h, w) where there are neither latents nor a state that "
                    "says its size, got None"
                )
            return None, None, (state.batch // state.rows, channels, *state.size)
        checks.tensor("first_frames", first_frames, ("B", channels, "T", "h", "w"))
        batch, channels, frames, height, width = first_frames.shape
        pinned = state is None and 0 < frames < grid.bounds(0)[1]
        if frames == 0 or not (grid.begins_at(frames) or pinned):
            first = f" after a first chunk of {grid.first_chunk_frames}" if grid.first_chunk_frames else ""
            fewer = "" if state is not None else ", or fewer than the first chunk"
            raise ValueError(
                f"first_frames must be (B, C, T, h, w) with T a multiple of chunk_frames {grid.chunk_frames}{first}"
                f"{fewer}, got {checks.shown(first_frames)}"
            )
        checks.movable("first_frames", first_frames, device)
        patch_size = config.get("patch_size")
        sides = (patch_size, patch_size) if isinstance(patch_size, int) else tuple(patch_size or (1, 1))[-2:]
        if height % sides[0] or width % sides[1]:
            raise ValueError(
                f"first_frames' h and w must be multiples of patch_size {patch_size}, got {checks.shown(first_frames)}"
            )
        if state is not None and (batch != state.batch // state.rows or state.size not in (None, (height, width))):
            raise ValueError(
                f"first_frames must be of the state's {state.batch // state.rows} clips of {state.size} latents, got "
                f"{checks.shown(first_frames)}"
            )
        clean = first_frames.to(device, torch.promote_types(first_frames.dtype, torch.float32))
        return (None, clean, (batch, channels, height, width)) if pinned else (
            clean, None, (batch, channels, height, width)
        )  # fmt: skip

    def _check_state(self, state: Any, guided: bool) -> None:
        if not isinstance(state, RolloutState):
            raise ValueError(f"state must be None or a RolloutState, got {checks.shown(state)}")
        if state.rows != 1 + guided:
            kinds = {1: "without guidance", 2: "with guidance"}
            raise ValueError(f"state was made {kinds.get(state.rows)}, this call is {kinds[1 + guided]}")
        wanted = facts_of(self.transformer, self.transformer.dtype)
        state.check_facts("state", {name: value for name, value in wanted.items() if name in state.facts})
        tensor = next((t for block in state.blocks for t in block.values()), None)
        if tensor is not None and tensor.device != self._execution_device:
            raise ValueError(f"state must be on {self._execution_device}, got one on {tensor.device}")

    def _check_noise(
        self,
        latents: Tensor | None,
        shape: tuple[int, int, int, int],
        grid: ChunkGrid,
        consumed: int,
        chunks: int | None,
    ) -> Tensor | None:
        if latents is None:
            return None
        if chunks is None:
            raise ValueError("latents are the noise of all chunks that are made: num_chunks must be given")
        frames = grid.bounds(grid.index(consumed) + chunks - 1)[1] - consumed
        B, C, h, w = shape
        checks.tensor("latents", latents, (B, C, frames, h, w))
        checks.movable("latents", latents, self._execution_device)
        return latents.to(self._execution_device, torch.promote_types(latents.dtype, torch.float32))

    def _check_text(self, embeds: Any, mask: Tensor | None, batch: int, num_chunks: int | None) -> EachChunk | None:
        """What each chunk reads; ValueError unless there is one prompt a clip."""
        width = self._text_width
        if (embeds is None) != (width is None):
            raise ValueError(
                f"prompt_embeds is {checks.shown(embeds)}, but the transformer's cross_attention_dim is {width}: "
                "both or neither"
            )
        if embeds is None:
            if mask is not None:
                raise ValueError("prompt_attention_mask is for prompt_embeds, which are not given")
            return None

        def of_chunk(value: Any) -> tuple[Tensor, Tensor | None]:
            own, own_mask = value if isinstance(value, (list, tuple)) and len(value) == 2 else (value, mask)
            return self._text("prompt_embeds", own, "prompt_attention_mask", own_mask, batch)

        chunks = EachChunk("prompt_embeds", embeds, of_chunk, num_chunks)
        if mask is not None and not isinstance(embeds, Tensor):
            raise ValueError(
                "prompt_attention_mask is for one tensor of prompt_embeds: by chunk, give pairs with masks"
            )
        return chunks

    def _check_negative(
        self, embeds: Tensor | None, mask: Tensor | None, batch: int, guided: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        if not guided:
            return None
        if embeds is None or self._text_width is None:
            raise ValueError(
                "guidance_scale other than 1.0 needs negative_prompt_embeds, and a transformer that reads text"
            )
        return self._text("negative_prompt_embeds", embeds, "negative_prompt_attention_mask", mask, batch)

    @property
    def _text_width(self) -> int | None:
        """Channels of a text that the model reads, None for one that reads none."""
        config = self.transformer.config
        names = ("caption_channels", "text_dim", "cross_attention_dim")  # SANA's, Wan's, VideoDiT's
        return next((config[name] for name in names if config.get(name)), None)

    def _text(self, name: str, embeds: Any, mask_name: str, mask: Any, batch: int) -> tuple[Tensor, Tensor | None]:
        """On the model's device and in its dtype; ValueError unless there is one text a clip."""
        device = self._execution_device
        checks.tensor(name, embeds, (batch, "L", self._text_width))  # type: ignore[arg-type]
        if mask is not None:
            checks.mask(mask_name, mask, embeds.shape[:2], (name, embeds))
            checks.movable(mask_name, mask, device)
            mask = mask.to(device)
        checks.movable(name, embeds, device)
        return embeds.to(device, self.transformer.dtype), mask

    # --- chunk after chunk ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _chunks(self, rollout: _Rollout, steps: dict[str, Any]) -> Iterator[Tensor]:
        grid, passes, prefix = ChunkGrid.of(self.transformer.config), rollout.passes, rollout.prefix
        begun = 0
        # Once for all chunks: it waits for the device. A chunk's steps count in a copy, which remembers them perhaps.
        self.scheduler.set_timesteps(**steps, device=self._execution_device)
        self.scheduler.set_begin_index(0)  # else it looks the index up, which waits for the device
        scheduler = deepcopy(self.scheduler)
        self._num_timesteps = len(scheduler.timesteps)
        try:
            for number in count() if rollout.num_chunks is None else range(rollout.num_chunks):
                try:
                    text = None if rollout.text is None else rollout.text.take()
                except StopIteration:
                    return
                if prefix is not None:
                    self._commit(prefix, text, self._camera(prefix.shape[2], rollout), rollout)
                    prefix = None
                first, last = grid.bounds(grid.index(passes.frames))
                B, C, h, w = rollout.shape
                if rollout.noise is None:
                    x = randn_tensor(
                        (B, C, last - first, h, w), generator=rollout.generator, device=self._execution_device,
                        dtype=rollout.dtype,
                    )  # fmt: skip
                else:
                    x = rollout.noise[:, :, begun : begun + last - first]
                begun += last - first
                camera = self._camera(last - first, rollout)
                pinned = rollout.pinned if number == 0 else None
                clean = self._denoise(x, deepcopy(scheduler), text, camera, pinned, rollout)
                if clean is None:
                    return
                self._commit(clean, text, camera, rollout)
                yield clean
                if self._interrupt:
                    return
        finally:
            passes.release()
            self.maybe_free_model_hooks()

    def _camera(self, frames: int, rollout: _Rollout) -> dict[str, Any] | None:
        """What the model is told of the camera in its next frames, the same in each step."""
        if rollout.camera is None:
            return None
        return camera_of(self.transformer, rollout.camera.take(frames), self._execution_device)

    def _commit(self, clean: Tensor, text: Any, camera: Any, rollout: _Rollout) -> None:
        """Take clean frames into the state."""
        timestep = clean.new_zeros(clean.shape[0], clean.shape[2])
        size = (clean.shape[3], clean.shape[4])
        arguments = self._arguments(clean, timestep, text, camera, rollout)
        rollout.passes.commit(arguments, rows=1 + (rollout.negative is not None), size=size)

    def _denoise(
        self,
        x: Tensor,
        scheduler: Any,
        text: Any,
        camera: Any,
        pinned: Tensor | None,
        rollout: _Rollout,
    ) -> Tensor | None:
        """One chunk from its noise x; None where it was interrupted."""
        given = 0 if pinned is None else pinned.shape[2]
        for step, t in enumerate(scheduler.timesteps):
            if self._interrupt:
                return None
            if pinned is not None:
                x = torch.cat([pinned, x[:, :, given:]], 2)
            timestep = t.expand(x.shape[0], x.shape[2])
            if given:
                timestep = torch.cat([timestep.new_zeros(x.shape[0], given), timestep[:, given:]], 1)
            arguments = self._arguments(x, timestep, text, camera, rollout)
            prediction = rollout.passes.predict(arguments).to(x.dtype)
            if rollout.negative is not None:
                away, toward = prediction.chunk(2)
                prediction = away + self._guidance_scale * (toward - away)
            if self.config.prediction_type == "sample":
                prediction = (x - prediction) / (t / scheduler.config.num_train_timesteps)
            x = scheduler.step(prediction, t, x, return_dict=False)[0]
            x = self._call_back(step, t, x, text, rollout)
        if self._interrupt:
            return None
        return x if pinned is None else torch.cat([pinned, x[:, :, given:]], 2)

    def _call_back(self, step: int, t: Tensor, x: Tensor, text: Any, rollout: _Rollout) -> Tensor:
        if rollout.callback is None:
            return x
        negative = rollout.negative
        tensors = {
            "latents": x,
            "prompt_embeds": None if text is None else text[0],
            "negative_prompt_embeds": None if negative is None else negative[0],
        }
        asked = {name: tensors[name] for name in rollout.callback_tensors}
        answer = rollout.callback(self, step, t, asked) or {}
        latents = answer.get("latents", x)
        checks.tensor("callback_on_step_end's latents", latents, x.shape, dtype=x.dtype, device=x.device)
        return latents  # type: ignore[no-any-return]

    def _arguments(
        self,
        x: Tensor,
        timestep: Tensor,
        text: tuple[Tensor, Tensor | None] | None,
        camera: Any,
        rollout: _Rollout,
    ) -> dict[str, Any]:
        """The model's arguments for x (B, C, T, h, w) at timestep (B, T), of 2 B rows with guidance."""
        if rollout.negative is not None and text is not None:
            x, timestep = x.repeat(2, 1, 1, 1, 1), timestep.repeat(2, 1)
            text = _joined(rollout.negative, text)
        return arguments_of(self.transformer, x.to(self.transformer.dtype), timestep, text, camera)


def _joined(
    negative: tuple[Tensor, Tensor | None], text: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Both texts in one batch, the shorter one with padding; its mask is all of it that is no padding."""
    longest = max(embeds.shape[1] for embeds, _ in (negative, text))
    both, masks = [], []
    for embeds, mask in (negative, text):
        padding = longest - embeds.shape[1]
        both.append(nn.functional.pad(embeds, (0, 0, 0, padding)))
        own = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device) if mask is None else mask.bool()
        masks.append(nn.functional.pad(own, (0, padding)))
    plain = negative[1] is None and text[1] is None and negative[0].shape[1] == text[0].shape[1]
    return torch.cat(both), None if plain else torch.cat(masks)


def is_flow_matching(scheduler: Any) -> bool:
    """Whether it is a scheduler of diffusers that goes along the line from noise to clip."""
    if not isinstance(scheduler, SchedulerMixin) or not hasattr(scheduler, "set_begin_index"):
        return False
    return type(scheduler).__name__.startswith("FlowMatch") or bool(scheduler.config.get("use_flow_sigmas"))


def check_generator(generator: Any, batch: int) -> None:
    """ValueError unless it is None, a torch.Generator or one for each of `batch` clips."""
    if generator is None or isinstance(generator, torch.Generator):
        return
    one_each = isinstance(generator, list) and len(generator) == batch
    if not one_each or not all(isinstance(item, torch.Generator) for item in generator):
        raise ValueError(
            f"generator must be None, a torch.Generator or a list of one for each of the {batch} clips, got "
            f"{checks.shown(generator)}"
        )
