"""Small calls of every kernel, for a memory checker: `compute-sanitizer python -m tests.gpu.memory_check`."""

import torch

from frame_gdn import cp_frame_gdn_scan
from frame_gdn.gdn import bidirectional_gdn
from frame_gdn.kernels.triton.steps import TritonSteps

from ..kernels.test_operators import CALLS, arguments
from ..kernels.test_steps import tokens


def main() -> None:
    """The scan in one span of frames and in two, at a narrow head and at one of two channel blocks; the operators."""
    for spans, D in ((1, 24), (2, 24), (2, 144)):
        backend = TritonSteps(spans=spans)
        inputs, tables = tokens(1, 3, 21, 2, D, torch.bfloat16)
        leaves = [x.detach().requires_grad_() for x in inputs.values()]
        out, _ = bidirectional_gdn(*leaves, rotary=tables, backend=backend)
        out.float().square().sum().backward()
        chains = [torch.rand(2, 3, *size, device="cuda").requires_grad_() for size in ((D, D), (D, D), (D, D), (D,))]
        S, z = cp_frame_gdn_scan(*chains, backend=backend)
        (S.sum() + z.sum()).backward()
    for name, (module, shapes, options) in CALLS.items():
        getattr(module, name)(*arguments(shapes, options))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
