"""The operations around the scan, each a `torch.library` operator of its own file."""

from .gate import silu_gate
from .glu_conv import glu_conv
from .modulation import modulated_norm
from .norm import norm_relu
from .residual import residual
from .rotary import rotary
from .short_conv import short_conv
from .ucpe import turn

__all__ = [
    "glu_conv",
    "modulated_norm",
    "norm_relu",
    "residual",
    "rotary",
    "short_conv",
    "silu_gate",
    "turn",
]
