"""What every kernel computes, written to a file, so that two commits can be compared to the bit.

    python -m tests.gpu.dump_operators before.pt          # at one commit
    python -m tests.gpu.dump_operators after.pt           # at another, on the same device
    python -m tests.gpu.dump_operators --compare before.pt after.pt

Runs on a CUDA device where there is one, else on the CPU (with TRITON_INTERPRET=1). It finds the operators by their
registered names and the backends by the modules that have held them, so that it runs at commits of either layout.
"""

import argparse
import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: Modules that register operators or hold a backend, in every layout that the repository has had.
_TRITON = [f"frame_gdn.kernels.triton.{name}" for name in (
    "short_conv", "norm", "gate", "modulation", "residual", "rotary", "glu_conv", "ucpe", "steps",
)]  # fmt: skip
_EARLIER = [f"frame_gdn.triton_{name}" for name in ("layer", "block", "ffn", "rays", "kernels")]
_PLAIN = ["frame_gdn.kernels.plain", "frame_gdn.torch_kernels"]
_TYPES = ["frame_gdn.kernels.types", "frame_gdn.torch_kernels"]


@functools.cache
def modules(names: tuple[str, ...]) -> tuple[Any, ...]:
    """Those of the named modules that this commit has."""
    found = []
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            found.append(importlib.import_module(name))
    return tuple(found)


def attribute(names: list[str], attribute: str) -> Any:
    return next(getattr(module, attribute) for module in modules(tuple(names)) if hasattr(module, attribute))


class Random:
    """Tensors from one seed, made on the CPU, so that every device and commit sees the same numbers."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(DEVICE, dtype)


# --- the scan's steps -------------------------------------------------------------------------------------------

#: B, T, S, H, D: short and odd for the interpreter; among them SANA-WM's D and a D of two blocks of channels.
SMALL = [(2, 4, 7, 2, 24), (1, 2, 9, 1, 112), (1, 2, 5, 1, 144)]
REAL = [(1, 21, 880, 20, 112), (1, 96, 16, 2, 64), (2, 5, 257, 3, 128), (1, 4, 100, 2, 256)]


def scan_inputs(shape: tuple[int, ...], dtype: torch.dtype, rotary: str, masked: bool) -> Any:
    B, T, S, H, D = shape
    N, random = T * S, Random(sum(shape))
    qkv = random.normal(B, N, 3, H, D)
    qkv[:, :, :2].relu_()
    qkv[:, :, 1] *= (D * S) ** -0.5
    q, k, v = qkv.to(dtype).unbind(2)
    beta, decay = random.uniform(B, N, H, dtype=dtype), 0.7 + 0.3 * random.uniform(B, T, H)
    angle = 6.28 * random.uniform(N, D // 2)
    rotated = (q.flip(-1), k.flip(-1)) if rotary == "given" else (None, None)
    tables = (angle.cos(), angle.sin()) if rotary == "tables" else (None, None)
    mask = None
    if masked:
        mask = torch.ones(B, T, dtype=torch.bool, device=DEVICE)
        mask[:, 1::3] = False
    return attribute(_TYPES, "Inputs")(q, k, v, beta, decay, *rotated, mask, *tables)


def steps_of(backend: str, x: Any, normalize: bool, chunk: int | None, steps: Any) -> dict[str, Any]:
    """Everything that each step of a backend returns, forward and backward."""
    Edges = attribute(_TYPES, "Edges")
    B, _, H, D = x.q.shape
    T = x.decay.shape[1]
    random = Random(7)
    S0, z0 = random.normal(B, H, D, D), random.normal(B, H, D) if normalize else None
    entering, nothing = Edges(S0, z0, None, None), Edges(None, None, None, None)
    ends = [chunk is not None and (t + 1) % chunk == 0 for t in range(T)]
    reverse = chunk != 1
    tr = steps.transitions(x, normalize)
    found: dict[str, Any] = {"transitions": [part for part in tr if isinstance(part, Tensor)]}
    found["shard_transitions"] = steps.shard_transitions(tr)
    states, found["leaves"] = steps.scan_states(tr, entering, ends, reverse)
    found["states"] = states
    found["leaving"] = steps.leaving(tr, nothing, ends, reverse)
    found["out"] = out = steps.project(x, states, 1e-6)
    dout = random.normal(*out.shape, dtype=out.dtype)
    dq, dq_rot, dX, dx = found["project_backward"] = steps.project_backward(dout, x, states, 1e-6)
    found["leaving_adjoint"] = steps.leaving_adjoint(tr, dX, dx, ends, reverse)
    adjoint, found["adjoint_leaves"] = steps.scan_states_adjoint(tr, dX, dx, entering, ends, reverse)
    found["adjoint"] = adjoint
    found["transitions_backward"] = steps.transitions_backward(x, tr, entering, states, adjoint)
    return found


def primitive_of(steps: Any, BH: int, T: int, D: int) -> dict[str, Any]:
    random = Random(11)
    A = [random.normal(BH, T, D, D) / D**0.5 for _ in range(2)]
    B = [random.normal(BH, T, D, D), random.normal(BH, T, 1, D)]
    initial = [random.normal(BH, D, D), random.normal(BH, 1, D)]
    return {
        "scans": steps.scans(A, B, initial),
        "from_zero": steps.scans(A, B, [None, None]),
        "scans_adjoint": steps.scans_adjoint(A, B, initial),
        "last_states": steps.last_states(A, B, initial),
        "product": [steps.product(a) for a in A],
    }


def scan_calls() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    TritonSteps, plain = attribute([*_TRITON, *_EARLIER], "TritonSteps"), modules(tuple(_PLAIN))[0]
    variants = [("none", False, True, None), ("given", True, True, 2), ("tables", True, True, 1),
                ("tables", False, False, None), ("tables", False, True, None)]  # fmt: skip
    shapes = SMALL + (REAL if DEVICE == "cuda" else [])
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for rotary, masked, normalize, chunk in variants:
                ways = ((False, None), (False, 2), (True, None))
                for exact, spans in ways if DEVICE == "cuda" or (rotary, chunk) == ("tables", 1) else ways[:1]:
                    name = f"triton {shape} {dtype} {rotary} {masked} {normalize} {chunk} exact={exact} spans={spans}"
                    steps = TritonSteps(exact=exact, spans=spans)
                    x = functools.partial(scan_inputs, shape, dtype, rotary, masked)
                    yield name, lambda x=x, n=normalize, c=chunk, s=steps: steps_of("triton", x(), n, c, s)
        for rotary, masked, normalize, chunk in variants:
            if rotary != "tables":  # the plain backend is given rotated tokens
                x = functools.partial(scan_inputs, shape, torch.float32, rotary, masked)
                yield (
                    f"plain {shape} {rotary} {masked} {normalize} {chunk}",
                    lambda x=x, n=normalize, c=chunk: steps_of("plain", x(), n, c, plain),
                )
    for BH, T, D in ((2, 5, 24), (1, 3, 136), *([(20, 121, 112), (2, 96, 64)] if DEVICE == "cuda" else [])):
        for spans in (None, 2):
            steps = TritonSteps(spans=spans)
            yield f"primitive {(BH, T, D)} spans={spans}", lambda s=steps, n=(BH, T, D): primitive_of(s, *n)
        yield f"primitive {(BH, T, D)} plain", lambda n=(BH, T, D): primitive_of(plain, *n)


# --- the operators around the scan ------------------------------------------------------------------------------


def operator_calls() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    modules(tuple(_TRITON + _EARLIER))
    sizes = [(2, 3, 5, 2, 8), (1, 4, 9, 3, 112)]
    if DEVICE == "cuda":
        sizes += [(1, 21, 880, 20, 112), (2, 5, 257, 12, 128)]
    for B, T, S, H, D in sizes:
        C, N = H * D, T * S
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            random = Random(B * T * S * C)
            normal = functools.partial(random.normal, dtype=dtype)
            mask = torch.ones(B, T, dtype=torch.bool, device=DEVICE)
            mask[:, 1::2] = False
            tokens = normal(B, N, 3, C)[:, :, 1]
            halo, frames = normal(B, 3, S, C), normal(B, T, 2, C)[:, :, 1]
            angle = random.normal(1, N, D // 2)
            turns, matrix = random.normal(1, N, D // 4, 2), random.normal(B, N, 4, 4)
            images = normal(B * T, S, 3, 2 * C)
            calls: list[tuple[str, tuple[Any, ...]]] = [
                ("short_conv", (tokens.unflatten(1, (T, S)), halo, halo, normal(C, 1, 4), None)),
                ("short_conv", (tokens.unflatten(1, (T, S)), halo, None, normal(C, 1, 4), [0, 2, 99])),
                ("short_conv", (tokens.unflatten(1, (T, S)), None, None, normal(C, 1, 2), None)),
                ("norm_relu", (tokens, normal(C), 1e-5, 0.5)),
                ("silu_gate", (tokens, normal(B, N, C))),
                ("modulated_norm", (tokens, frames, frames, mask, 1e-6)),
                ("modulated_norm", (tokens, frames, frames.float(), None, 1e-6)),
                ("residual", (tokens, normal(B, N, C), frames, tokens, mask, T)),
                ("residual", (tokens, normal(B, N, C), frames, None, None, T)),
                ("residual", (tokens, normal(B, N, C), None, tokens, mask, T)),
                ("rotary", (tokens.unflatten(-1, (H, D)), angle.cos(), angle.sin(), False)),
                ("glu_conv", (images, normal(2 * C, 1, 3, 3), normal(2 * C), True)),
                ("glu_conv", (images, normal(2 * C, 1, 1, 1), None, False)),
                ("turn", (tokens.unflatten(-1, (H, D)), matrix, turns, False)),
                ("turn", (tokens.unflatten(-1, (H, D)), matrix, turns, True)),
            ]
            for i, (name, arguments) in enumerate(calls):
                title = f"{name} {i} {(B, T, S, H, D)} {dtype}"
                yield title, functools.partial(operator_and_gradients, name, arguments)


def operator_and_gradients(name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    constant = {"turn": (1, 2), "rotary": (1, 2)}.get(name, ())
    leaves = [
        x.detach().requires_grad_(i not in constant and x.is_floating_point()) if isinstance(x, Tensor) else x
        for i, x in enumerate(arguments)
    ]
    out = getattr(torch.ops.frame_gdn, name)(*leaves)
    outs = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if x.numel() and x.requires_grad]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    random = Random(13)
    grads = torch.autograd.grad(outs, wanted, [random.normal(*x.shape, dtype=x.dtype) for x in outs])
    return {"out": out, "gradients": list(grads)}


# --- writing and comparing --------------------------------------------------------------------------------------


def flat(x: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from flat(value, f"{name}.{key}")
    elif isinstance(x, (tuple, list)):
        for i, value in enumerate(x):
            yield from flat(value, f"{name}.{i}")


def fingerprint(x: Tensor) -> tuple[Any, ...]:
    """Shape, dtype, and two sums over the bits that a single changed bit or an exchange of two elements changes."""
    bits = x.detach().flatten().contiguous().view(torch.uint8)
    words = torch.nn.functional.pad(bits, (0, -bits.numel() % 4)).view(torch.int32).long()
    place = torch.arange(words.numel(), device=words.device) % 1000003 + 1
    return tuple(x.shape), str(x.dtype), int(words.sum()), int((words * place).sum())


def dump(path: str) -> None:
    found: dict[str, tuple[Any, ...]] = {}
    for calls in (scan_calls, operator_calls):
        for name, call in calls():
            found |= {key: fingerprint(x) for key, x in flat(call(), name)}
    torch.save({"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter", "found": found}, path)
    print(f"{len(found)} tensors written to {path}")


def compare(before: str, after: str) -> int:
    first, second = (torch.load(path, weights_only=True) for path in (before, after))
    if first["device"] != second["device"]:
        print(f"the devices differ: {first['device']}, {second['device']}")
    names = first["found"].keys() | second["found"].keys()
    wrong = sorted(name for name in names if first["found"].get(name) != second["found"].get(name))
    for name in wrong:
        print(f"differs: {name}: {first['found'].get(name)} {second['found'].get(name)}")
    print(f"{len(names) - len(wrong)} of {len(names)} tensors are equal to the bit")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="compare two files instead of writing one")
    parser.add_argument("paths", nargs="+")
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*arguments.paths)
    dump(*arguments.paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
