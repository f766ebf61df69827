"""Numbers that are shown are the numbers that were measured."""

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import report, video_dit

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MEASURED = sorted(RESULTS.glob("*.json"))
#: What takes milliseconds is repeated twenty times; a whole model as often as its benchmark can afford.
OFTEN = ("scan", "layer")


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_a_summary_follows_from_its_raw_medians(path):
    raw = json.loads(path.read_text())
    summarize = importlib.import_module(f"benchmarks.{raw['benchmark']}").summarize
    assert summarize(raw) == pytest.approx(raw["summary"], rel=1e-12)


@pytest.mark.parametrize("path", [path for path in MEASURED if path.stem in OFTEN], ids=lambda path: path.stem)
def test_enough_repetitions_of_every_contestant(path):
    raw = json.loads(path.read_text())
    parts = [part["contestants"] for part in raw.values() if isinstance(part, dict) and "contestants" in part]
    assert parts
    for contestants in parts:
        assert all(len(times["ms"]) >= 20 for times in contestants.values())


def test_the_readme_shows_the_results_files():
    readme = (RESULTS.parents[1] / "README.md").read_text()
    assert report.filled(readme) == readme, "run python -m benchmarks.report"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90", "attention"),
        ("_transitions_kernel", "scan"),
        ("_glu_conv_kernel", "convolutions"),
        ("void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, float>", "convolutions"),
        *[
            (name, "elementwise")
            for name in (
                "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
                "void at::native::reduce_kernel<512, 1>",
                "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>",
                "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
                "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>",
                "Memcpy DtoD (Device -> Device)",
                "_conv_kernel",
                "_modulated_norm_kernel",
                "a_kernel_that_nobody_knows",
            )
        ],
    ],
)
def test_a_kernel_counts_as_what_it_is(kernel, kind):
    assert video_dit.kind_of(kernel) == kind
