"""Every launch has a tile that fits an RTX 4090's shared memory: its kernel is compiled for it, which needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

#: Shared memory that a block of sm_89 may have, in bytes.
LIMIT = 101376


def launches(D, dtype, exact, rotary):
    """What one call of `bidirectional_gdn` and of the primitive launches, forward and backward, cut into spans.

    (kernel, arguments, options, tiles) of each launch, which is not run: what tensors hold is arbitrary.
    """
    from frame_gdn.agreement import Call
    from frame_gdn.kernels.triton.launch import Launcher
    from frame_gdn.kernels.triton.steps import TritonSteps
    from frame_gdn.kernels.types import Inputs
    from frame_gdn.scan import GDNOptions, ScanOptions, frame_scan, gdn_scan

    found = []

    class Recorder(Launcher):
        def shared_memory(self, device):
            return LIMIT

        def launch(self, kernel, grid, arguments, options, tiles):
            found.append((kernel, arguments, options, tiles))

    B, T, S, H = 1, 4, 16, 1

    def tensor(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, requires_grad=True)

    q, k, v = (tensor(B, T * S, H, D) for _ in range(3))
    rotated = [tensor(B, T * S, H, D) if rotary == "given" else None for _ in range(2)]
    tables = [tensor(T * S, D // 2, dtype=torch.float32).detach() if rotary == "tables" else None for _ in range(2)]
    x = Inputs(q, k, v, tensor(B, T * S, H), tensor(B, T, H, dtype=torch.float32), *rotated, None, *tables)
    S0, z0 = tensor(B, H, D, D, dtype=torch.float32), tensor(B, H, D, dtype=torch.float32)
    for spans in (1, 2):
        steps = TritonSteps(exact=exact, spans=spans, launcher=Recorder())
        options = GDNOptions(True, 1e-6, True, [False] * T, None, None, False, steps)
        gdn_scan(x, S0, z0, options)[0].sum().backward()
        if dtype == torch.float32:
            A, rows = (tensor(H, T, D, D) for _ in range(2)), (tensor(H, T, D, D), tensor(H, T, 1, D))
            call = Call("cp_frame_gdn_scan", {}, T)
            X = frame_scan([*A], rows, (None, None), ScanOptions(False, None, "collective", None, steps, call))
            (X[0].sum() + X[1].sum()).backward()
    return found


KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8"}


def specialized(value, place, constants, attributes):
    """The type of one argument as Triton compiles for it; notes constants and alignments by the argument's place."""
    if isinstance(value, tuple):
        return tuple(specialized(x, (*place, i), constants, attributes) for i, x in enumerate(value))
    if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
        attributes[place] = [["tt.divisibility", 16]]
    if isinstance(value, torch.Tensor):
        return f"*{KINDS[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    if value == 1:
        constants[place] = 1
        return "constexpr"
    return "i32" if value < 2**31 else "i64"


def compiled(kernel, arguments, options, tile, capability=89):
    """The kernel as a launch with these arguments would have it."""
    import triton
    from triton.backends.compiler import GPUTarget

    named = {**options, **{name: n for name, n in tile.items() if name not in ("num_warps", "maxnreg")}}
    signature, constants, attributes = {}, {}, {}
    values = iter(arguments)
    for i, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", named[parameter.name]
        else:
            signature[parameter.name] = specialized(next(values), (i,), constants, attributes)
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    settings = {name: n for name, n in tile.items() if name in ("num_warps", "maxnreg")}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings)


def misfits(D, dtype, exact, rotary):
    """The launches none of whose tiles fits, least tile first: (kernel, options, bytes of the least)."""
    tried, found = set(), []
    for kernel, arguments, options, tiles in launches(D, getattr(torch, dtype), exact, rotary):
        # Which way a scan runs and what enters it make no difference to what it holds.
        same = {"HAS_IN", "HAS_IN0", "HAS_IN1", "HAS_STATES", "KINDS", "ENTERING", "CUT"}
        key = (kernel.__name__, *(x for name, x in options.items() if name not in same))
        if key in tried:
            continue
        tried.add(key)
        sizes = (compiled(kernel, arguments, options, tile).metadata.shared for tile in reversed(tiles))
        if all((least := size) > LIMIT for size in sizes):
            found.append((kernel.__name__, options, least))
    assert tried
    return found


@pytest.mark.parametrize(
    "case",
    [
        "64 float32 default tables",
        "112 bfloat16 default tables",
        "128 float16 default given",
        "128 float32 default given",
        "256 bfloat16 default tables",
        "256 bfloat16 exact tables",
    ],
)
def test_some_tile_of_every_launch_fits_an_rtx_4090(case):
    """In a process of its own, where triton compiles; here it may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_shared_memory", *case.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    D, dtype, precision, rotary = sys.argv[1:]
    found = misfits(int(D), dtype, precision == "exact", rotary)
    sys.exit("\n".join(map(str, found)) or 0)
