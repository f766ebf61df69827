"""Which backend a tensor gets, asked about devices that are not here by their descriptions."""

import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from frame_gdn import backend_of, bidirectional_gdn
from frame_gdn.kernels import plain
from frame_gdn.kernels.backends import Hardware, announce, choose, hardware_of, pick_backend

from ..test_gdn import clip

H200 = Hardware("cuda:0", "cuda", "NVIDIA H200", (9, 0))

#: Devices that the kernels do not run on, and what the choice says of each.
UNSUPPORTED = {
    "ROCm": (Hardware("cuda:0", "cuda", "AMD Instinct MI300X", (9, 4), rocm=True), "an AMD GPU"),
    "ROCm, nameless": (Hardware("cuda:0", "cuda", "", (9, 4), rocm=True), "an AMD GPU"),
    "an AMD GPU behind CUDA": (Hardware("cuda:1", "cuda", "AMD Radeon RX 7900 XTX [ZLUDA]", (8, 8)), "an AMD GPU"),
    "Turing": (Hardware("cuda:0", "cuda", "Tesla T4", (7, 5)), r"8.0 or more, got cuda:0 \(Tesla T4\) with 7.5"),
    "Volta": (Hardware("cuda:3", "cuda", "Tesla V100", (7, 0)), r"got cuda:3 \(Tesla V100\) with 7.0"),
    "no triton": (H200._replace(triton_failure="ImportError: no libtriton"), "imported: ImportError: no lib"),
    "Apple": (Hardware("mps:0", "mps"), "a GPU, got mps:0"),
    "Intel": (Hardware("xpu:0", "xpu"), "a GPU, got xpu:0"),
    "a CPU": (Hardware("cpu", "cpu"), "a GPU, got cpu"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_auto_is_plain_on_a_device_that_the_kernels_do_not_support(case):
    hardware, reason = UNSUPPORTED[case]
    found = choose("auto", torch.bfloat16, 112, hardware)
    assert found.name == "torch"
    with pytest.raises(ValueError, match=f"backend 'triton' needs .*{reason}"):
        choose("triton", torch.bfloat16, 112, hardware)
    assert choose("torch", torch.bfloat16, 112, hardware).name == "torch"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_triton_on_nvidia_gpus_from_ampere_on(capability, dtype):
    name, reason = choose("auto", dtype, 112, H200._replace(capability=capability))
    assert name == "triton" and "112 channels on NVIDIA H200" in reason


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [(torch.float64, 64, "got float64"), (torch.bfloat16, 257, "up to 256, got 257"), (torch.int32, 8, "got int32")],
)
def test_what_the_kernels_do_not_take_is_plain_or_refused_by_name(dtype, head_dim, reason):
    found = choose("auto", dtype, head_dim, H200)
    assert found.name == "torch" and reason in found.reason
    with pytest.raises(ValueError, match=reason):
        choose("triton", dtype, head_dim, H200)


def test_backend_of_is_the_backend_that_computes():
    x = torch.randn(1, 4, 2, 8)
    assert backend_of(x) == ("torch", "backend 'triton' needs tensors on a GPU, got cpu")
    assert backend_of(x, "torch").reason == "backend 'torch' was asked for"
    assert backend_of(x.to("meta")).name == "torch"
    assert pick_backend("auto", x) is plain
    if hardware_of(x.device, asked=True).interpreted:
        assert backend_of(x, "triton").name == "triton" and pick_backend("triton", x) is not plain
    for bad, name in (([1.0], "auto"), (torch.tensor(1.0), "auto"), (x, "cuda"), (x, None), (x.double(), "triton")):
        with pytest.raises(ValueError, match="tensor must be|backend must be one of torch, triton, auto|got float64"):
            backend_of(bad, name)


def test_a_plain_path_on_a_gpu_is_said_once_a_reason():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for reason in ("one thing", "another", "one thing"):
            announce(reason)
    assert [str(warning.message).partition("'triton' ")[2] for warning in said] == ["one thing", "another"]


def test_an_accelerator_without_kernels_takes_the_plain_path_and_says_so():
    """A fake tensor stands for it: torch knows an Intel GPU's device type without the GPU."""
    with FakeTensorMode(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        q = torch.empty(1, 6, 2, 8, device="xpu:7")
        assert pick_backend("auto", q) is plain and pick_backend("auto", q) is plain
    assert [str(warning.message) for warning in said] == [
        "backend 'auto' takes the plain PyTorch path: backend 'triton' needs tensors on a GPU, got xpu:7"
    ]


def test_a_triton_that_cannot_be_imported_is_one_that_is_missing(tmp_path):
    """As a wheel for another system, whose library fails to load."""
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: wrong ELF class')\n")
    code = """
import sys, torch
sys.path.insert(0, sys.argv[1])
sys.path.insert(1, ".")
from frame_gdn import backend_of, bidirectional_gdn
q = torch.rand(1, 6, 2, 8)
bidirectional_gdn(q, q, q, q[..., 0], q[:, :3, :, 0])
assert backend_of(q).name == "torch"
try:
    bidirectional_gdn(q, q, q, q[..., 0], q[:, :3, :, 0], backend="triton")
except ValueError as error:
    assert "needs triton, which cannot be imported: ImportError: libtriton.so: wrong ELF class" in str(error), error
else:
    raise AssertionError
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr


def test_the_choice_costs_microseconds():
    x = torch.randn(1, 4, 2, 8)
    pick_backend("auto", x)
    best = min(_seconds(lambda: pick_backend("auto", x), 200) for _ in range(5))
    assert best < 2e-5


def _seconds(call, times):
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def test_an_object_with_a_backends_steps_computes_in_its_place():
    class Counted:
        def __getattr__(self, name):
            used.append(name)
            return getattr(plain, name)

    used: list[str] = []
    tensors, _ = clip(T=3, S=2, D=8)
    given = {name: x for name, x in tensors.items() if name not in ("S0", "z0") and x is not None}
    out, _ = bidirectional_gdn(**given, backend=Counted())
    assert torch.equal(out, bidirectional_gdn(**given, backend="torch")[0])
    assert {"transitions", "scan_states", "project"} <= set(used)
    for bad in (None, 3, plain.transitions):
        with pytest.raises(ValueError, match="backend must be one of torch, triton, auto"):
            bidirectional_gdn(**given, backend=bad)
