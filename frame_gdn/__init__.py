"""Frame-wise Gated DeltaNet attention for video diffusion: fast on one GPU, exact across many, streaming without
end."""

from .gdn import GDNState, bidirectional_gdn
from .layer import BidirectionalGDN
from .parallelize import parallelize
from .primitive import CpFrameGdnScanResult, cp_frame_gdn_scan
from .swap import swap, unswap

__all__ = [
    "BidirectionalGDN",
    "CpFrameGdnScanResult",
    "GDNState",
    "bidirectional_gdn",
    "cp_frame_gdn_scan",
    "parallelize",
    "swap",
    "unswap",
]
