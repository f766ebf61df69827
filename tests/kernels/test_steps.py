"""Every Triton kernel against the float64 loop, values and all gradients; in the interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

from frame_gdn import cp_frame_gdn_scan
from frame_gdn.functional import rotary as rotary_embedding
from frame_gdn.gdn import GDNState, bidirectional_gdn
from frame_gdn.kernels import plain
from frame_gdn.kernels.naive import naive_bidirectional_gdn, naive_frame_scan
from frame_gdn.kernels.types import Edges, Inputs

from ..helpers import relative_error

pytest.importorskip("triton")

from frame_gdn.kernels.triton.launch import Launcher
from frame_gdn.kernels.triton.scan import FactoredTransitions, best_span
from frame_gdn.kernels.triton.steps import TritonSteps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: What float32 sums in another order may differ by; and twice what rounding to 16 bits does to one tensor.
FLOAT32 = 3e-6
#: The interpreter cuts bfloat16 off where a GPU rounds, so that there the bound is twice as wide.
HALF = {torch.bfloat16: 2**-7 if DEVICE == "cpu" else 2**-8, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory is NaN, so that whatever a kernel fails to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def tokens(B, T, S, H, D, dtype):
    """q, k, v as strided views of one tensor, gates, and rotary tables."""
    N = T * S
    qkv = torch.randn(B, N, 3, H, D, device=DEVICE, dtype=torch.float64)
    qkv[:, :, :2].relu_()
    qkv[:, :, 1] *= (D * S) ** -0.5
    q, k, v = qkv.to(dtype).unbind(2)
    beta = torch.rand(B, N, H, device=DEVICE).to(dtype)
    decay = (0.7 + 0.3 * torch.rand(B, T, H, device=DEVICE)).to(dtype)
    angle = 6.28 * torch.rand(N, D // 2, device=DEVICE)
    return {"q": q, "k": k, "v": v, "beta": beta, "decay": decay}, (angle.cos(), angle.sin())


def check_against_the_loop(
    B=1, T=3, S=5, H=2, D=24, dtype=torch.float32, *, rotary="given", masked=False, state=False, chunk_frames=None,
    first_chunk_frames=None, merge_tail=False, normalize=True, precision="default", backend="triton", bound=FLOAT32,
):  # fmt: skip
    """Output, final state and every gradient of `bidirectional_gdn` on Triton against the loop in float64."""
    inputs, tables = tokens(B, T, S, H, D, dtype)
    if rotary == "given":
        inputs |= {f"{name}_rot": rotary_embedding(inputs[name], *tables, backend="torch") for name in ("q", "k")}
    if state:
        inputs["S0"] = 0.1 * torch.randn(B, H, D, D, device=DEVICE)
        inputs["z0"] = torch.rand(B, H, D, device=DEVICE)
    grid = {"chunk_frames": chunk_frames, "first_chunk_frames": first_chunk_frames, "merge_tail": merge_tail}
    mask = None
    if masked:
        mask = torch.ones(B, T, dtype=torch.bool, device=DEVICE)
        mask[:, 1::2] = False

    exact = {name: x.double().requires_grad_() for name, x in inputs.items()}
    given = dict(exact)
    initial = (given.pop("S0"), given.pop("z0")) if state else None
    if rotary == "tables":
        wide = [table.double() for table in tables]
        given |= {f"{name}_rot": rotary_embedding(given[name], *wide, backend="torch") for name in ("q", "k")}
    expected, (S, z) = naive_bidirectional_gdn(
        **given, mask=mask, initial_state=initial, **grid, normalize=normalize, eps=1e-6
    )
    ends = [S, z] if normalize else [S]
    directions = [torch.randn_like(x) for x in (expected, *ends)] if state else [torch.randn_like(expected)]
    sum((x * d).sum() for x, d in zip((expected, *ends), directions, strict=False)).backward()

    ours = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    if masked:
        with torch.no_grad():
            for name, x in ours.items():
                if name not in ("S0", "z0"):
                    poisoned = x.clone().unflatten(1, (T, -1))
                    poisoned[~mask] = float("nan")
                    ours[name] = poisoned.flatten(1, 2).requires_grad_()
    given = dict(ours)
    initial = GDNState(given.pop("S0"), given.pop("z0")) if state else None
    out, final = bidirectional_gdn(
        **given, rotary=tables if rotary == "tables" else None, mask=mask, initial_state=initial,
        output_final_state=state, **grid, normalize=normalize, eps=1e-6, backend=backend,
        precision=precision,
    )  # fmt: skip
    found = [out]
    if final is not None:
        found += [final.S, final.z] if normalize else [final.S]
    sum((x.double() * d).sum() for x, d in zip(found, directions, strict=False)).backward()

    errors = {"out": relative_error(out, expected)}
    if final is not None:
        errors |= {"S": relative_error(final.S, S), "z": relative_error(final.z, z) if normalize else 0.0}
    for name, x in exact.items():
        if x.grad is None or not x.grad.any():
            assert ours[name].grad is None or not ours[name].grad.any(), f"{name} has a gradient"
            continue
        errors[f"d{name}"] = relative_error(ours[name].grad, x.grad)
        if masked and name not in ("S0", "z0"):
            assert not ours[name].grad.unflatten(1, (T, -1))[~mask].any(), f"{name} has a gradient in a padded frame"
    worst = {name: error for name, error in errors.items() if not error <= bound}
    assert not worst, f"beyond {bound}: {worst} of {errors}"


@pytest.mark.parametrize("rotary", ["none", "given", "tables"])
@pytest.mark.parametrize("chunk_frames", [None, 1, 2])
def test_every_direction_and_rotation(rotary, chunk_frames):
    check_against_the_loop(rotary=rotary, chunk_frames=chunk_frames)


@pytest.mark.parametrize("rotary", ["none", "given", "tables"])
def test_padded_frames_reach_nothing_and_states_carry_on(rotary):
    check_against_the_loop(B=2, T=4, rotary=rotary, masked=True, state=True, chunk_frames=3)


def test_numerator_alone():
    check_against_the_loop(normalize=False, state=True, masked=True)


@pytest.mark.parametrize(
    ("T", "S", "H", "D"),
    [(1, 5, 1, 24), (2, 1, 3, 16), (5, 17, 1, 40), (2, 7, 1, 112), (2, 3, 1, 136), (2, 3, 1, 256)],
)
def test_ugly_shapes(T, S, H, D):
    check_against_the_loop(T=T, S=S, H=H, D=D, rotary="tables")


@pytest.mark.parametrize(
    ("D", "options"),
    [
        (144, {"rotary": "none", "masked": True, "state": True}),
        (144, {"rotary": "given", "normalize": False, "chunk_frames": 2}),
        (131, {"rotary": "none"}),
        (256, {"rotary": "given", "masked": True}),
        (256, {"rotary": "tables", "dtype": torch.float16, "bound": 3 * HALF[torch.float16]}),
        (144, {"rotary": "tables", "dtype": torch.bfloat16, "bound": 3 * HALF[torch.bfloat16]}),
    ],
)
def test_heads_of_several_channel_blocks(D, options):
    check_against_the_loop(**{"S": 3, "H": 1, "D": D, **options})


@pytest.mark.parametrize("rotary", ["none", "given", "tables"])
def test_narrow_blocks_for_a_device_of_little_shared_memory(rotary):
    class Small(Launcher):
        def shared_memory(self, device):
            return 0

    backend = TritonSteps(launcher=Small())
    check_against_the_loop(D=24, rotary=rotary, masked=True, state=True, backend=backend)


@pytest.mark.parametrize("D", [24, 33])
def test_an_odd_head_dimension_needs_no_tables(D):
    check_against_the_loop(D=D, rotary="none", state=True)


@pytest.mark.parametrize("rotary", ["given", "tables"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_stay_near_their_rounding(dtype, rotary):
    check_against_the_loop(S=33, D=40, dtype=dtype, rotary=rotary, bound=3 * HALF[dtype])


def test_exact_arithmetic_for_16_bits():
    inputs, _ = tokens(1, 3, 17, 2, 24, torch.float16)
    expected, _ = naive_bidirectional_gdn(**{name: x.double() for name, x in inputs.items()}, eps=1e-6)
    out, _ = bidirectional_gdn(**inputs, eps=1e-6, backend="triton", precision="exact")
    rounding = relative_error(expected.half(), expected)
    assert relative_error(out, expected) <= 1.01 * rounding


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_no_magnitude_overflows_the_scaled_products(scale):
    """Queries and values of any size: float16 operands are scaled by powers of two, which the result undoes."""
    inputs, tables = tokens(1, 2, 9, 1, 24, torch.bfloat16)
    out, _ = bidirectional_gdn(**inputs, rotary=tables, normalize=False, backend="triton")
    inputs["q"], inputs["v"] = inputs["q"] * scale, inputs["v"] * scale
    scaled, _ = bidirectional_gdn(**inputs, rotary=tables, normalize=False, backend="triton")
    assert relative_error(scaled.double() / scale**2, out.double()) <= 2 * HALF[torch.bfloat16]


def test_two_calls_are_equal_to_the_bit():
    inputs, tables = tokens(1, 3, 9, 2, 24, torch.bfloat16)
    runs = []
    for _ in range(2):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        out, _ = bidirectional_gdn(**leaves, rotary=tables, backend="triton")
        out.square().sum().backward()
        runs.append([out, *(x.grad for x in leaves.values())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def check_the_primitive(BH, T, D, initial, backend="triton", bound=FLOAT32):
    """States and every gradient of `cp_frame_gdn_scan` on Triton against the loop in float64, W not symmetric."""

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=DEVICE, dtype=torch.float64)

    inputs = [random(BH, T, D, D) / D**0.5, random(BH, T, D, D), random(BH, T, D, D) / D**0.5, random(BH, T, D)]
    states = [random(BH, D, D), random(BH, D)] if initial else []
    exact = [x.clone().requires_grad_() for x in (*inputs, *states)]
    ours = [x.float().requires_grad_() for x in (*inputs, *states)]
    expected = naive_frame_scan(*exact[:4], initial_state=tuple(exact[4:]) or None)
    found = cp_frame_gdn_scan(*ours[:4], initial_state=tuple(ours[4:]) or None, backend=backend)
    for x, y in zip(found, expected, strict=True):
        direction = torch.randn_like(y)
        assert relative_error(x, y) <= bound
        (x.double() * direction).sum().backward(retain_graph=True)
        (y * direction).sum().backward(retain_graph=True)
    for x, y in zip(ours, exact, strict=True):
        assert relative_error(x.grad, y.grad) <= bound


@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 3, 24), (1, 2, 136)])
@pytest.mark.parametrize("initial", [False, True])
def test_the_primitive_and_its_gradients(shape, initial):
    check_the_primitive(*shape, initial)


# --- spans of frames side by side -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "options"),
    [
        (2, {"rotary": "none"}),
        (3, {"masked": True, "state": True}),
        (5, {"B": 2, "rotary": "tables", "state": True, "chunk_frames": 3}),
        (3, {"rotary": "none", "masked": True, "chunk_frames": 4}),
        (2, {"state": True, "chunk_frames": 1}),
        (1, {"state": True, "chunk_frames": 3, "first_chunk_frames": 4}),
        (3, {"state": True, "chunk_frames": 2, "first_chunk_frames": 4, "merge_tail": True}),
        (5, {"chunk_frames": 3, "first_chunk_frames": 1, "merge_tail": True}),
        (5, {"H": 2, "state": True, "normalize": False}),
        (2, {"T": 3, "D": 136, "rotary": "none"}),
    ],
)
def test_spans_side_by_side_equal_the_loop(spans, options):
    check_against_the_loop(**{"T": 7, "S": 2, "H": 1, "D": 16, **options}, backend=TritonSteps(spans=spans))


def test_spans_keep_a_state_that_lives_a_hundred_frames():
    """In 16-bit products too: through the spans' transitions a state comes as exactly as frame after frame."""
    T, D = 100, 16
    A = 0.02 * torch.rand(1, 1, 1, T, D, D, dtype=torch.float64, device=DEVICE) / D
    A = (A + A.mT).half()
    U = torch.zeros(1, 1, T, D, D, device=DEVICE)
    U[:, :, 0].normal_()
    gate = 1 - 0.001 * torch.rand(1, 1, T, device=DEVICE)
    eye = torch.eye(D, device=DEVICE)
    expected = U[:, :, 0].double()
    for t in range(1, T):
        expected = expected @ (gate[..., t].double() * (eye - A[0, :, :, t].double()))
    errors = {}
    for spans in (1, 9):
        steps = TritonSteps(spans=spans)
        tr = FactoredTransitions(A, U, gate, "tf32")
        states, _ = steps.scan_states(tr, Edges(None, None, None, None), [False] * T, reverse=False)
        errors[spans] = relative_error(states.S[:, :, -1], expected)
    assert errors[9] <= 1.2 * errors[1], errors


@pytest.mark.parametrize("rotary", ["none", "given"])
def test_the_transition_of_a_shard_is_the_same_in_spans(rotary):
    inputs, _ = tokens(1, 7, 3, 2, 16, torch.float32)
    rotated = [inputs["k"].flip(-1) if rotary == "given" else None] * 2
    x = Inputs(*inputs.values(), *rotated, None)
    found = []
    for spans in (1, 3):
        steps = TritonSteps(spans=spans)
        found.append(steps.shard_transitions(steps.transitions(x, normalize=True)))
    expected = plain.shard_transitions(plain.transitions(x, normalize=True))
    for one, three, exact in zip(*found, expected, strict=True):
        assert relative_error(one, exact) <= FLOAT32 and relative_error(three, exact) <= FLOAT32


@pytest.mark.parametrize("spans", [2, 5])
@pytest.mark.parametrize("initial", [False, True])
def test_the_primitive_in_spans(spans, initial):
    check_the_primitive(2, 7, 16, initial, TritonSteps(spans=spans))


def test_a_full_device_scans_frame_after_frame_and_an_empty_one_in_spans():
    assert best_span(121, programs=200, transitions=160, multiprocessors=132) == 121
    assert best_span(16, programs=40, transitions=32, multiprocessors=132) == 16
    assert best_span(121, programs=40, transitions=32, multiprocessors=132) < 40
    assert best_span(2048, programs=10, transitions=8, multiprocessors=132) <= 64
    assert best_span(2048, programs=2, transitions=1, multiprocessors=1) == 2048


def test_unsupported_tensors_are_refused_by_name():
    inputs, _ = tokens(1, 2, 3, 1, 24, torch.float64)
    with pytest.raises(ValueError, match="float64"):
        bidirectional_gdn(**inputs, backend="triton")
    inputs, _ = tokens(1, 2, 3, 1, 258, torch.float32)
    with pytest.raises(ValueError, match="258"):
        bidirectional_gdn(**inputs, backend="triton")
    inputs, tables = tokens(1, 2, 3, 1, 24, torch.float32)
    with pytest.raises(ValueError, match="precision"):
        bidirectional_gdn(**inputs, backend="triton", precision="fast")
    with pytest.raises(ValueError, match="rotary"):
        bidirectional_gdn(**inputs, q_rot=inputs["q"], rotary=tables, backend="triton")


def test_no_frames_at_all():
    inputs, tables = tokens(1, 0, 3, 2, 24, torch.float32)
    state = GDNState(torch.randn(1, 2, 24, 24, device=DEVICE), torch.randn(1, 2, 24, device=DEVICE))
    out, final = bidirectional_gdn(
        **inputs, rotary=tables, initial_state=state, output_final_state=True, backend="triton"
    )
    assert out.shape == (1, 0, 2, 24)
    assert torch.equal(final.S, state.S) and torch.equal(final.z, state.z)
