"""SANA-WM (`SanaWMTransformer3DModel`): the same weights and outputs, other arithmetic around them.

What looks across frames: the short convolutions, the two scans of a GDN block, the two softmax attentions of every
n-th block, the feed-forward's temporal convolution, and the rotary positions. Each of them is replaced here, and with
them what they are called by, so that one `Span` made by the model reaches all of them:

    model.py          the host's three functions, block and model
    attention.py      the two attentions of a block, main and camera branch
    geometry.py       poses and lens to the matrix of every ray
    rays.py           UCPE, what the camera branch does around its attention
    feed_forward.py   the gated feed-forward with its temporal convolution
    modules.py        short convolution, norms, patch embedding

Source of the formulas: `transformer_sana_wm.py` of diffusers 0.42, after NVlabs/Sana.
"""

from ... import needs_diffusers as needs_diffusers  # isort: skip

import torch
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # a pipeline that loads looks for it here

#: What the host casts to where its softmax would meet float32.
HALF = torch.bfloat16

from .attention import (  # noqa: E402
    BidirectionalGDNUCPESinglePathLiteLA as BidirectionalGDNUCPESinglePathLiteLA,
)
from .attention import _SoftmaxUCPESinglePathLiteLA as _SoftmaxUCPESinglePathLiteLA  # noqa: E402
from .feed_forward import GLUMBConvTemp as GLUMBConvTemp  # noqa: E402
from .feed_forward import SanaWMConvLayer as SanaWMConvLayer  # noqa: E402
from .model import SanaVideoMSCamCtrlBlock as SanaVideoMSCamCtrlBlock  # noqa: E402
from .model import SanaWMTransformer3DModel as SanaWMTransformer3DModel  # noqa: E402
from .model import cover as cover  # noqa: E402
from .model import present as present  # noqa: E402
from .model import replace as replace  # noqa: E402
from .modules import LayerNorm as LayerNorm  # noqa: E402
from .modules import RMSNorm as RMSNorm  # noqa: E402
from .modules import SanaWMPatchEmbed as SanaWMPatchEmbed  # noqa: E402
from .modules import SanaWMTemporalShortConvolution as SanaWMTemporalShortConvolution  # noqa: E402
