"""SANA-WM: the host's three functions, its block and its model.

Source of the formulas: `transformer_sana_wm.py` of diffusers 0.42, after NVlabs/Sana.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from typing import Any

import torch
from diffusers.models.transformers import transformer_sana_wm as host
from torch import Tensor, nn

from ... import checks, functional, parallel
from ...rollout_state import RolloutState
from .. import GRID_ENTRIES, READINGS, WINDOW_ENTRIES, SwapOptions, Swapped, adopt, configuration
from ..clip import Span, call_block, facts_of, locate, rotary_angles
from ..configuration import ConfiguredModel, swapping_init
from ..rollout import Carried, begin, end, output, position
from .attention import BidirectionalGDNUCPESinglePathLiteLA, _SoftmaxUCPESinglePathLiteLA
from .feed_forward import GLUMBConvTemp, SanaWMConvLayer, convolutions
from .geometry import ray_matrices, up_and_latitude
from .modules import LayerNorm, RMSNorm, SanaWMPatchEmbed, SanaWMTemporalShortConvolution

# --- the host's three functions ---------------------------------------------------------------------------------


def present(model: nn.Module) -> SwapOptions:
    """Chunks as in the configuration. The blocks of a swapped model are those that are: in no configuration, for a
    block computes the same either way."""
    options = configuration.present(model)
    if not isinstance(model, SanaWMTransformer3DModel):
        return options
    return changed(options, blocks=_swapped(model))


def _swapped(model: Any) -> list[int]:
    return [index for index, block in enumerate(model.blocks) if isinstance(block.attn, Swapped)]


def replace(model: nn.Module, options: SwapOptions) -> None:
    """Swap the chosen blocks; ValueError for start_scale, and for chunk_frames on some of the blocks only."""
    if options.start_scale is not None:
        raise ValueError(
            "start_scale is for hosts whose gates are new: SanaWMTransformer3DModel keeps its own weights"
        )
    blocks: Any = model.blocks
    chosen = sorted({*options.chosen(len(blocks)), *_swapped(model)})
    if options.chunk_frames is not None and len(chosen) < len(blocks):
        raise ValueError(
            f"chunk_frames needs all blocks swapped, not {chosen} alone: diffusers' own attention looks past the end "
            "of a chunk (blocks=None swaps all)"
        )
    sites: list[tuple[nn.Module, type[Swapped]]] = [(model, SanaWMTransformer3DModel)]
    sites += [(m, SanaWMPatchEmbed) for m in model.children() if isinstance(m, host.SanaWMPatchEmbed)]
    sites += [(block, SanaVideoMSCamCtrlBlock) for block in blocks]
    for index in chosen:
        sites += [(m, REPLACEMENTS[type(m).__name__]) for m in blocks[index].modules() if _has_replacement(m)]
        if isinstance(blocks[index].mlp, host.GLUMBConvTemp):
            sites += convolutions(blocks[index].mlp)
    adopt(sites, **options.of_sites)
    configuration.write(model, {name: getattr(options, name) for name in (*GRID_ENTRIES, *WINDOW_ENTRIES, *READINGS)})


def cover(model: nn.Module) -> None:
    """Swap every block that is not: none of diffusers' sites is right over shards."""
    replace(model, changed(present(model), blocks=None))


def _has_replacement(module: nn.Module) -> bool:
    found = REPLACEMENTS.get(type(module).__name__)
    return found is not None and isinstance(module, found.host_class())


# --- block and model ---------------------------------------------------------------------------------------------


class SanaVideoMSCamCtrlBlock(Swapped, host.SanaVideoMSCamCtrlBlock):
    """A block as in the host, its masks selecting; its attention and feed-forward may be swapped or the host's."""

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        mask: Tensor | None = None,
        THW: tuple[int, int, int] | None = None,
        rotary_emb: Tensor | None = None,
        block_mask: Tensor | None = None,
        camera_conditions: Tensor | None = None,
        ucpe_ray_transforms: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None,
        plucker_emb: Tensor | None = None,
        frame_valid_mask: Tensor | None = None,
        chunk_size: int | None = None,
        clip: Span | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """x (B, N, C), y (B, 1, L, C), t (B, 1, T, 6 C) -> (B, N, C); arguments as in the host.

        Args:
            clip: tells what `frame_valid_mask` does.
            state: the block's part of the state that is continued.

        Returns:
            the tokens, and the block's part of the new state too where `clip` asks for one.
        """
        clip = locate(self, x, t.shape[2], frame_valid_mask=frame_valid_mask) if clip is None else clip.to(x.device)
        modulation = self.scale_shift_table + t.reshape(x.shape[0], clip.frames, 6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(2)  # (B, T, C) each

        x = clip.select(x)
        h = self._modulated(self.norm1, x, shift1, scale1, clip)
        rotary_and_camera = {
            "rotary_emb": rotary_emb,
            "camera_conditions": camera_conditions,
            "ucpe_ray_transforms": ucpe_ray_transforms,
        }
        carried = None if state is None and clip.active is None else Carried(state or {})
        if isinstance(self.attn, Swapped):
            h = self.attn(h, HW=THW, **rotary_and_camera, clip=clip, carried=carried)
        else:
            h = self.attn(h, HW=THW, **rotary_and_camera, frame_valid_mask=clip.mask)
        given = plucker_emb is not None and hasattr(self, "plucker_proj")
        x = self._add(x, h, clip, gate1, self.plucker_proj(plucker_emb) if given else None)
        x = self._add(x, self.cross_attn(x, y, mask=mask), clip)
        h = self._modulated(self.norm2, x, shift2, scale2, clip)
        if isinstance(self.mlp, Swapped):
            h = self.mlp(h, HW=THW, clip=clip, carried=carried)
        else:
            h = self.mlp(h, HW=THW)
        x = self._add(x, h, clip, gate2)
        return x if carried is None or clip.active is None else (x, carried.new)

    def state_shapes(self, batch: int, tokens: int, kept: int, camera: bool) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of what a rollout carries in this block, for `kept` frames of keys and values."""
        shapes: dict[str, tuple[int, ...]] = self.attn.state_shapes(batch, tokens, kept, camera)
        if isinstance(self.mlp, GLUMBConvTemp):
            shapes |= self.mlp.state_shapes(batch, tokens, self.scale_shift_table.shape[1])
        return shapes

    def _modulated(self, norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor, clip: Span) -> Tensor:
        if isinstance(norm, LayerNorm):
            out: Tensor = norm(x, shift, scale, clip)
            return out
        return functional.modulate(norm(x), shift, scale, clip.mask)

    def _add(
        self, x: Tensor, h: Tensor, clip: Span, gate: Tensor | None = None, extra: Tensor | None = None
    ) -> Tensor:
        """x + gate · h + extra: tokens (B, N, C) but for the gate (B, T, C); 0 in padded frames."""
        return functional.gated_residual(x, h, gate, extra, clip.mask, frames=clip.frames, backend=self.backend)


class SanaWMTransformer3DModel(ConfiguredModel, host.SanaWMTransformer3DModel):
    """The model: finds out where its frames lie in the clip, once a call, and tells every block.

    Built or loaded under this name, it is swapped from the start, and A_log and dt_bias stay float32 whatever the
    load's `torch_dtype`.

    Args:
        chunk_frames, first_chunk_frames, merge_tail, softmax_window, softmax_sink, camera_conv_past, camera_rescale,
            softmax_scale: as in `swap`.
        frame_gdn: options as a mapping, as earlier versions saved those of other hosts; the other arguments are the
            host's.
    """

    __module__ = "frame_gdn.hosts.sana_wm"  # what a saved pipeline names

    _keep_in_fp32_modules = ["A_log", "dt_bias"]

    __init__ = swapping_init(
        host.SanaWMTransformer3DModel.__init__, replace, *GRID_ENTRIES, *WINDOW_ENTRIES, *READINGS
    )

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        mask: Tensor | None = None,
        return_dict: bool = True,
        data_info: dict[str, Any] | None = None,
        camera_conditions: Tensor | None = None,
        chunk_plucker: Tensor | None = None,
        cam_pos_embeds: dict[str, Tensor] | None = None,
        pos_embeds: Tensor | None = None,
        raymats: Tensor | None = None,
        frame_valid_mask: Tensor | None = None,
        chunk_size: int | None = None,
        state: RolloutState | None = None,
        output_state: bool = False,
    ) -> Any:
        """As in the host. Under a group, `hidden_states`, `timestep`, `camera_conditions`, `chunk_plucker`, the mask
        and whatever else has frames hold this rank's own, and so does the output.

        Args:
            state: continue from here. The call's first frame is then the first of a chunk; the state is left as it is.
            output_state: return the state after the last active frame too, the same on all ranks, as `.state` or as
                the second of a tuple.

        Raises:
            ValueError: a state that does not fit the model and the call, one given under a group, one that stands
                inside a chunk, or a short tail that continues it alone with merge_tail; a state asked for where
                frame_valid_mask's active frames are not one prefix, equal in the batch, or where blocks are not
                swapped.
        """
        text_mask = encoder_attention_mask if mask is None else mask
        with parallel.checked(self.group, due=True):
            checks.tensor("hidden_states", hidden_states, ("B", "C", "T", "h", "w"))
            if text_mask is None:
                raise ValueError("encoder_attention_mask (or mask) is needed: the text's padding")
            size = tuple(n // p for n, p in zip(hidden_states.shape[2:], self.patch_size, strict=True))
            arguments = {
                "hidden_states": hidden_states, "timestep": timestep,
                "encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask,
                "mask": mask, "data_info": data_info, "camera_conditions": camera_conditions,
                "chunk_plucker": chunk_plucker, "cam_pos_embeds": cam_pos_embeds, "pos_embeds": pos_embeds,
                "raymats": raymats,
            }  # fmt: skip
            facts = facts_of(self, FRAMES_DIMS, arguments)
            call = {"camera": camera_conditions is not None}
            made_with = isinstance(state, RolloutState) and any("cam.S" in b or "cam.keys" in b for b in state.blocks)
            if isinstance(state, RolloutState) and made_with != call["camera"]:
                raise ValueError("a rollout has a camera (camera_conditions) in all of its calls or in none")
            grid = begin(self, state, output_state, hidden_states, size, **call)
        clip = locate(
            self, hidden_states, size[0], facts, frame_valid_mask, grid=grid, state=state, output_state=output_state
        )
        if clip.mask is not None:
            hidden_states, timestep = finite(hidden_states, clip.mask, 2), finite(timestep, clip.mask, 2)
            if camera_conditions is not None:
                camera_conditions = finite(camera_conditions, clip.mask, 1, LENS)
            if chunk_plucker is not None:
                chunk_plucker = finite(chunk_plucker, clip.mask, 2)

        # 1. Patches, positions and camera
        dtype = self.dtype
        latents = hidden_states.to(dtype)
        image = (data_info or {}).get("image_vae_embeds")
        x = self.x_embedder(latents if image is None else torch.cat([latents, image.to(dtype)], 1))
        if pos_embeds is not None:
            pos_embeds = squeezed(pos_embeds.to(x.device), 4)
        elif self.use_pe:
            pos_embeds = self._positions(position(state) + clip.start, size, x.device)
        rays = None
        if camera_conditions is not None:
            given = {k: squeezed(t.to(x.device), 4) for k, t in (cam_pos_embeds or {}).items() if k != "absmap"}
            absmap = (cam_pos_embeds or {}).get("absmap")
            if absmap is not None:
                raymats = given.get("P", raymats)
            elif not {"P", "P_inv"} <= given.keys():
                raymats = ray_matrices(camera_conditions, size, self.patch_size)
            if not self.use_chunk_plucker_post_attn:
                if absmap is None:
                    absmap = up_and_latitude(camera_conditions, size, self.patch_size)
                x = x + self.raymap_embedder(squeezed(absmap.to(x), 5))
            rays = host._prepare_ucpe_ray_transforms(
                self.linear_head_dim, camera_conditions, size, self.patch_size, pos_embeds, raymats, given
            )
        plucker = None
        if self.use_chunk_plucker_post_attn and chunk_plucker is not None:
            plucker = self.plucker_embedder(chunk_plucker.to(dtype))

        # 2. Noise levels and text
        levels = self.time_proj(timestep.long().float().flatten()).to(dtype)
        embedded = self.t_embedder(levels).unflatten(0, timestep.shape)
        modulation = self.t_block(embedded)
        y = self.y_embedder(encoder_hidden_states.to(dtype))
        if self.y_norm:
            y = self.attention_y_norm(y)
        text_mask = text_mask.to(torch.int16)
        if len(text_mask) != len(y):
            text_mask = text_mask.repeat(len(y) // len(text_mask), 1)
        text_mask = text_mask.squeeze(1).squeeze(1)

        # 3. Blocks
        states = []
        for index, block in enumerate(self.blocks):
            x = call_block(
                self, block, x, y, modulation, text_mask, size, pos_embeds, None, camera_conditions, rays, plucker,
                None, chunk_size, clip, None if state is None else state.blocks[index],
            )  # fmt: skip
            if output_state:
                x, block_state = x
                states.append(block_state)

        # 4. Back to latents
        sample = self.unpatchify(self.final_layer(x, embedded), *size)
        new_state = end(self, state, states, clip) if output_state else None
        return output(sample, new_state, return_dict)

    def camera_tables(self, camera_conditions: Tensor, size: Sequence[int]) -> dict[str, Tensor]:
        """What a forward makes of a camera alone, as its argument `cam_pos_embeds`: once for all steps of a chunk.

        Args:
            camera_conditions: (B, T, 20).
            size: T, h, w in latents.
        """
        size = tuple(n // p for n, p in zip(size, self.patch_size, strict=True))
        P = ray_matrices(camera_conditions, size, self.patch_size).flatten(1, 3)
        tables = {"P": P, "P_inv": host._invert_SE3(P)}
        if not self.use_chunk_plucker_post_attn:
            tables["absmap"] = up_and_latitude(camera_conditions, size, self.patch_size)
        return tables

    def state_shapes(
        self, batch: int, tokens: int, kept: int, camera: bool = False
    ) -> list[dict[str, tuple[int, ...]]]:
        """By block, the shapes of what a rollout carries, for `kept` frames of keys and values; ValueError where
        blocks are not swapped."""
        stock = [index for index, block in enumerate(self.blocks) if not isinstance(block.attn, Swapped)]
        if stock:
            raise ValueError(f"a state needs all blocks swapped (blocks=None): blocks {stock} are diffusers' own")
        return [block.state_shapes(batch, tokens, kept, camera) for block in self.blocks]

    def _positions(self, first_frame: int | Tensor, size: tuple[int, ...], device: torch.device) -> Tensor:
        """The host's complex table (1, 1, N, D/2) from a frame on."""
        angles = rotary_angles(self.linear_head_dim, first_frame, size, device, self.rope.max_seq_len)
        return torch.polar(torch.ones_like(angles), angles)[None, None]


def squeezed(x: Tensor, dims: int) -> Tensor:
    """x without its second dimension, which is 1, until it has so many."""
    while x.dim() > dims:
        x = x.squeeze(1)
    return x


#: By argument of the model, the dimension of the frames, or of their tokens: a rank has its own.
FRAMES_DIMS = {
    "hidden_states": 2,
    "timestep": 2,
    "camera_conditions": 1,
    "chunk_plucker": 2,
    "pos_embeds": 2,
    "raymats": 1,
}

#: A camera at the origin that is safe to divide by: what stands in for one that is not finite in a padded frame.
LENS = (1.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0, 1.0, 1.0, 0, 0)


def finite(x: Tensor, mask: Tensor, dim: int, otherwise: Sequence[float] = (0.0,)) -> Tensor:
    """x with `otherwise` (along its last dimension) for what is not finite in padded frames; dimension `dim` is T."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = mask.shape
    fill = torch.tensor(otherwise, dtype=x.dtype, device=x.device)
    sound = x.isfinite() if len(otherwise) == 1 else x.isfinite().all(-1, keepdim=True)
    return torch.where(mask.view(shape) | sound, x, fill)


#: By the name that a replacement shares with what it replaces: the sites of a block.
REPLACEMENTS: dict[str, type[Swapped]] = {
    cls.__name__: cls
    for cls in (
        SanaWMTemporalShortConvolution,
        RMSNorm,
        LayerNorm,
        GLUMBConvTemp,
        SanaWMConvLayer,
        BidirectionalGDNUCPESinglePathLiteLA,
        _SoftmaxUCPESinglePathLiteLA,
    )
}
