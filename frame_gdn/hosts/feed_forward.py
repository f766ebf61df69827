"""What the feed-forwards of hosts share: convolutions in channels-last memory, with what follows them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .. import functional
from ..chunks import ChunkEnds
from . import Swapped


@dataclass(frozen=True)
class Frames:
    """What a temporal convolution must know of its frames, as `functional.temporal_conv`: past and future (B, 1, S, C)
    or None; a dataclass, so that no wrapper casts or moves what is in it."""

    past: Tensor | None
    future: Tensor | None
    ends: ChunkEnds | None


class Conv2d(Swapped, nn.Conv2d):
    """A convolution of images in channels-last memory: a pointwise one is a matrix product that adds the bias itself.

    What is fused happens within this call, where casting, offloading and adapters expect the weights to be used.
    """

    def forward(self, input: Tensor, glu_of: str | None = None, frames: Frames | None = None) -> Tensor:
        """(images, C, height, width) -> the same of other channels.

        Args:
            glu_of: of a depthwise convolution. It is one of SiLU(input) ("silu") or of the input ("identity"), and
                half its channels are multiplied by SiLU of the other half.
            frames: of a temporal convolution, of width 3 over the input's height: (B, C, T, S) -> input + convolution.
        """
        pixels = input.permute(0, 2, 3, 1)
        if glu_of is not None:
            out = functional.glu_conv(pixels, self.weight, self.bias, silu=glu_of == "silu", backend=self.backend)
        elif frames is not None:
            out = functional.temporal_conv(
                pixels,
                self.weight.squeeze(-1).transpose(1, 2).flatten(1),
                frames.past,
                frames.future,
                ends=frames.ends,
                backend=self.backend,
            )
        elif self.kernel_size == (1, 1) and self.groups == 1:
            out = functional.pointwise_conv(pixels, self.weight, self.bias)
        else:
            return super().forward(input)
        return out.permute(0, 3, 1, 2)


def free_convolutions(convolutions: Sequence[nn.Module]) -> list[tuple[nn.Module, type[Swapped]]]:
    """Convolutions as sites to swap, without those that an adapter wraps or a hook holds: they stay as they are."""
    free = [type(c) is Conv2d or (type(c) is nn.Conv2d and "forward" not in c.__dict__) for c in convolutions]
    return [(conv, Conv2d) for conv, is_free in zip(convolutions, free, strict=True) if is_free]
