"""Frame-wise Gated DeltaNet attention for video diffusion: one GPU, sharded over many, or streamed chunk by chunk."""

import importlib.util
from typing import TYPE_CHECKING, Any

from .gdn import GDNState, bidirectional_gdn
from .kernels.backends import BackendChoice, backend_of
from .layer import BidirectionalGDN
from .parallelize import parallelize
from .primitive import CpFrameGdnScanResult, cp_frame_gdn_scan
from .rollout_state import RolloutState
from .swap import swap, unswap

if TYPE_CHECKING:
    from .pipeline import FrameGDNRolloutPipeline

__version__ = "0.1.0"

__all__ = [
    "BackendChoice",
    "BidirectionalGDN",
    "CpFrameGdnScanResult",
    "FrameGDNRolloutPipeline",
    "GDNState",
    "RolloutState",
    "backend_of",
    "bidirectional_gdn",
    "cp_frame_gdn_scan",
    "parallelize",
    "swap",
    "unswap",
]
if importlib.util.find_spec("diffusers") is None:  # `from frame_gdn import *` works without
    __all__.remove("FrameGDNRolloutPipeline")


def __getattr__(name: str) -> Any:
    """The pipeline needs diffusers, which the rest does not: it is imported when it is asked for."""
    if name == "FrameGDNRolloutPipeline":
        from .pipeline import FrameGDNRolloutPipeline

        return FrameGDNRolloutPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
