"""What the compiler is told of every operator, its schema and the shapes and strides it returns, against the truth."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from frame_gdn.kernels.triton import gate, glu_conv, modulation, norm, residual, rotary, short_conv, ucpe
from frame_gdn.kernels.triton.launch import Launcher

from .test_steps import DEVICE

B, T, S, C, H, D = 2, 3, 5, 16, 2, 8


TOKENS, FRAMES, CLIP, IMAGES = (B, T * S, C), (B, T, C), (B, T, S, C), (2, 3, 4, 2 * C)
HEADS, RAYS, TABLE = (B, T * S, H, D), (B, T * S, 4, 4), (1, T * S, D // 4, 2)

#: By name: where it stands, the shapes of its tensors, and what follows them.
CALLS = {
    "short_conv": (short_conv, (CLIP, (B, 3, S, C), (B, 3, S, C), (C, 1, 4)), ([1, 2, 9],)),
    "short_conv_backward": (short_conv, (CLIP, CLIP, None, None, (C, 1, 4)), (None,)),
    "norm_relu": (norm, (TOKENS, (C,)), (1e-5, 0.5)),
    "norm_relu_backward": (norm, (TOKENS, TOKENS, (C,)), (1e-5, 0.5)),
    "silu_gate": (gate, (TOKENS, TOKENS), ()),
    "silu_gate_backward": (gate, (TOKENS, TOKENS, TOKENS), ()),
    "glu_conv": (glu_conv, (IMAGES, (2 * C, 1, 3, 3), (2 * C,)), (True,)),
    "glu_conv_backward": (glu_conv, ((2, 3, 4, C), IMAGES, (2 * C, 1, 3, 3), (2 * C,)), (True,)),
    "modulated_norm": (modulation, (TOKENS, FRAMES, FRAMES, None), (1e-6,)),
    "modulated_norm_backward": (modulation, (TOKENS, TOKENS, FRAMES, FRAMES, None, (2, B * T * S)), ()),
    "residual": (residual, (TOKENS, TOKENS, FRAMES, TOKENS, None), (T,)),
    "residual_backward": (residual, (TOKENS, TOKENS, FRAMES, None), (T,)),
    "rotary": (rotary, (HEADS, (1, T * S, D // 2), (1, T * S, D // 2)), (False,)),
    "turn": (ucpe, (HEADS, RAYS, TABLE), (False,)),
    "turn_backward": (ucpe, (HEADS, (B, T * S, H), HEADS, RAYS, TABLE), (False,)),
}


def arguments(shapes, options):
    return *(None if shape is None else torch.randn(shape, device=DEVICE) for shape in shapes), *options


@pytest.mark.parametrize("name", CALLS)
def test_fakes_promise_what_comes(name):
    module, shapes, options = CALLS[name]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(module, name), arguments(shapes, options), test_utils=checks)


class OnAnotherDevice(Launcher):
    """Compiles nothing; says that the tensors are on the second of two GPUs, where the first is the current one."""

    interpreted = False

    def __init__(self):
        super().__init__()
        self.current = 0

    def device_of(self, arguments):
        super().device_of(arguments)
        return torch.device("cuda", 1)

    def current_device(self):
        return self.current

    @contextlib.contextmanager
    def on(self, device):
        self.current, before = device.index, self.current
        yield
        self.current = before


def test_kernels_are_launched_on_their_tensors_device():
    """Not on the current one, which is another where a model was moved to "cuda:1"; afterwards that one is current."""
    launcher, seen = OnAnotherDevice(), []

    class Kernel:
        """As Triton's, and as what it compiles to."""

        __name__, params = "kernel", []

        def __getitem__(self, grid):
            return lambda *arguments, **options: seen.append((grid[0], launcher.current)) or self

    for programs in (3, 3, 4):  # compiled, looked up, compiled
        arguments = (torch.ones(4), 1, 1, 1), programs
        launcher.launch(Kernel(), lambda tile, n=programs: n, arguments, {}, ({"num_warps": 4},))
    assert seen == [(3, 1), (3, 1), (4, 1)] and launcher.current == 0
