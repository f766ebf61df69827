"""`FrameGDNRolloutPipeline`: a video as long as one wants, chunk after chunk. The only part of the package that needs
diffusers at import."""

from . import needs_diffusers as needs_diffusers  # isort: skip

from collections.abc import Iterator
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

PREDICTION_TYPES = ("velocity", "sample")


@dataclass
class RolloutOutput(BaseOutput):  # type: ignore[misc]
    """`latents` (B, C, num_chunks · chunk_frames, h, w): the generated frames, without the given ones."""

    latents: Tensor


class FrameGDNRolloutPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Continue a clip chunk by chunk: each new chunk is denoised in view of all that came before, through a state.

    The state is made by clean frames alone: a finished chunk passes the model once more, at timestep 0, before the
    next one begins. So every step equals a pass over [all clean chunks, the noisy chunk] with per-frame timesteps.

    Args:
        transformer: a chunk-causal model (config.chunk_frames is set), `models.VideoDiT` or one that is called as it
            is: `transformer(latents, timestep (B, T), ..., state=, output_state=)` with `.sample` and `.state`.
        scheduler: flow matching; a level sigma mixes (1 - sigma) · clip + sigma · noise.
        prediction_type: what the model was trained to predict, "velocity" (noise - clip) or "sample" (the clean clip).

    Raises:
        ValueError: a model that is not chunk-causal, a scheduler that is not flow matching, another prediction_type.
    """

    model_cpu_offload_seq = "transformer"

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

    @torch.no_grad()
    def __call__(
        self,
        first_frames: Tensor,
        num_chunks: int,
        num_inference_steps: int = 20,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
    ) -> RolloutOutput:
        """The next `num_chunks` chunks of a clip at once; arguments and errors as `stream`."""
        checks.integer("num_chunks", num_chunks, 1)
        text = {"prompt_embeds": prompt_embeds, "prompt_attention_mask": prompt_attention_mask}
        chunks = []
        with self.progress_bar(total=num_chunks) as progress:
            for chunk in self.stream(first_frames, num_chunks, num_inference_steps, generator, **text):
                chunks.append(chunk)
                progress.update()
        return RolloutOutput(torch.cat(chunks, dim=2))

    def stream(
        self,
        first_frames: Tensor,
        num_chunks: int | None = None,
        num_inference_steps: int = 20,
        generator: torch.Generator | list[torch.Generator] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """The chunks (B, C, chunk_frames, h, w) that follow the first frames, each as soon as it is clean.

        Args:
            first_frames: (B, C, T, h, w) clean latents, T a whole number of chunks.
            num_chunks: how many; None goes on without end.
            num_inference_steps: steps of the scheduler a chunk.
            generator: draws each chunk's noise when its turn comes, so that the first chunks of a long rollout are
                those of a short one.
            prompt_embeds: (B, L, E) text for a model with cross-attention.
            prompt_attention_mask: (B, L), True where the text is no padding.

        Raises:
            ValueError: before anything is computed, first frames that are not a whole number of chunks or do not fit
                the model, a text that does not fit either, and whatever is out of its range.
        """
        config, device = self.transformer.config, self._execution_device
        checks.tensor("first_frames", first_frames, ("B", config.get("in_channels", "C"), "T", "h", "w"))
        batch, _, frames, height, width = first_frames.shape
        grid = ChunkGrid.of(config)
        if frames == 0 or not grid.begins_at(frames):
            first = f" after a first chunk of {grid.first_chunk_frames}" if grid.first_chunk_frames else ""
            raise ValueError(
                f"first_frames must be (B, C, T, h, w) with T a multiple of chunk_frames {grid.chunk_frames}{first}, "
                f"got {checks.shown(first_frames)}"
            )
        checks.movable("first_frames", first_frames, device)
        patch_size = config.get("patch_size")
        if isinstance(patch_size, int) and (height % patch_size or width % patch_size):
            raise ValueError(
                f"first_frames' h and w must be multiples of patch_size {patch_size}, got {checks.shown(first_frames)}"
            )
        checks.integer("num_chunks", num_chunks, 1, optional=True)
        checks.integer("num_inference_steps", num_inference_steps, 1, self.scheduler.config.num_train_timesteps)
        check_generator(generator, batch)
        text = self._text(prompt_embeds, prompt_attention_mask, batch)
        clean = first_frames.to(device, torch.promote_types(first_frames.dtype, torch.float32))
        return self._chunks(clean, num_chunks, num_inference_steps, generator, text)

    def _text(self, embeds: Tensor | None, mask: Tensor | None, batch: int) -> dict[str, Tensor | None]:
        """The model's arguments, on its device and in its dtype; ValueError unless there is one prompt a clip."""
        width = self.transformer.config.get("cross_attention_dim")
        if (embeds is None) != (width is None):
            raise ValueError(
                f"prompt_embeds is {checks.shown(embeds)}, but the transformer's cross_attention_dim is {width}: "
                "both or neither"
            )
        if mask is not None and embeds is None:
            raise ValueError("prompt_attention_mask is for prompt_embeds, which are not given")
        device = self._execution_device
        if embeds is not None:
            checks.tensor("prompt_embeds", embeds, (batch, "L", width))
            if mask is not None:
                checks.mask("prompt_attention_mask", mask, embeds.shape[:2], ("prompt_embeds", embeds))
                checks.movable("prompt_attention_mask", mask, device)
                mask = mask.to(device)
            checks.movable("prompt_embeds", embeds, device)
            checks.movable("prompt_embeds", embeds, device)
            embeds = embeds.to(device, self.transformer.dtype)
        return {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}

    @torch.no_grad()
    def _chunks(
        self,
        clean: Tensor,
        num_chunks: int | None,
        num_inference_steps: int,
        generator: torch.Generator | list[torch.Generator] | None,
        text: dict[str, Any],
    ) -> Iterator[Tensor]:
        chunk_frames = self.transformer.config.chunk_frames
        shape = (*clean.shape[:2], chunk_frames, *clean.shape[3:])
        state = None
        for _ in count() if num_chunks is None else range(num_chunks):
            state = self._predict(clean, clean.new_zeros(()), text, state=state, output_state=True).state
            noise = randn_tensor(shape, generator=generator, device=clean.device, dtype=clean.dtype)
            clean = self._denoise(noise, num_inference_steps, text, state)
            yield clean

    def _denoise(self, x: Tensor, num_inference_steps: int, text: dict[str, Any], state: Any) -> Tensor:
        self.scheduler.set_timesteps(num_inference_steps, device=x.device)
        self.scheduler.set_begin_index(0)  # else it looks the index up, which waits for the device
        for t in self.scheduler.timesteps:
            prediction = self._predict(x, t, text, state=state).sample.to(x.dtype)
            if self.config.prediction_type == "sample":
                prediction = (x - prediction) / (t / self.scheduler.config.num_train_timesteps)
            x = self.scheduler.step(prediction, t, x, return_dict=False)[0]
        return x

    def _predict(self, x: Tensor, t: Tensor, text: dict[str, Any], **state: Any) -> Any:
        timestep = t.expand(x.shape[0], x.shape[2])
        return self.transformer(x.to(self.transformer.dtype), timestep, **text, **state)


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
