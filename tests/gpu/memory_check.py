"""One small call of every kernel, for a memory checker: `compute-sanitizer python -m tests.gpu.memory_check`."""

import torch

from frame_gdn import cp_frame_gdn_scan
from frame_gdn.gdn import bidirectional_gdn

from ..test_triton import tokens


def main() -> None:
    inputs, tables = tokens(1, 3, 21, 2, 24, torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    out, _ = bidirectional_gdn(*leaves, rotary=tables, backend="triton")
    out.float().square().sum().backward()
    chains = [torch.rand(2, 3, *size, device="cuda") for size in ((24, 24), (24, 24), (24, 24), (24,))]
    cp_frame_gdn_scan(*chains, backend="triton")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
