"""The source keeps what ARCHITECTURE.md says of it: imports go one way, files and signatures stay short."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: The modules of `frame_gdn`, or the folders they are in, each of which imports only from those before it.
ORDER = (
    "checks", "chunks", "rollout_state", "needs_diffusers", "kernels.types", "kernels.transforms", "kernels.products",
    "kernels.naive", "kernels.temporal_conv", "kernels.plain", "kernels.triton", "kernels.backends", "kernels.flash4",
    "functional", "agreement", "handshake", "parallel", "differentiable", "scan", "ops", "primitive", "gdn", "layer",
    "hosts", "parallelize", "swap", "camera", "rollout_call", "rollout_graph", "pipeline", "convert", "decoding",
)  # fmt: skip

#: What is written from the package, and what each of these imports of the others.
ABOVE = {"models": {"frame_gdn"}, "training": {"frame_gdn", "models"}}

MOST_LINES, MOST_ARGUMENTS = 650, 12

#: Signatures that others fix: the public function of the mathematics and its oracle, the forwards of diffusers'
#: models, a model's configuration.
LONG_SIGNATURES = {
    "gdn.bidirectional_gdn", "swap.swap", "kernels.naive.naive_bidirectional_gdn", "hosts.sana_wm.model.*.forward",
    "pipeline.FrameGDNRolloutPipeline.__call__", "pipeline.FrameGDNRolloutPipeline.stream",
    "video_dit.VideoDiT.__init__", "video_dit.VideoDiT.forward",
}  # fmt: skip


def sources(folder: str) -> Iterator[tuple[str, ast.Module]]:
    """Every module under a folder: its name from there on, without `.__init__`, and its syntax."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
        yield name.removesuffix("__init__").removesuffix("."), ast.parse(path.read_text())


def is_folder(folder: str, name: str) -> bool:
    return (ROOT / folder / name.replace(".", "/") / "__init__.py").exists()


def imported(folder: str, name: str, tree: ast.Module) -> Iterator[str]:
    """Full names of what a module imports, wherever in it: modules, or names in them."""
    inside = [folder, *name.split(".")] if name else [folder]
    package = inside if is_folder(folder, name) else inside[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layer(name: str) -> int | None:
    """Which of ORDER a name in `frame_gdn` belongs to."""
    return next((i for i, start in enumerate(ORDER) if f"{name}.".startswith(f"{start}.")), None)


def test_imports_go_one_way():
    for name, tree in sources("frame_gdn"):
        if name in ("", "kernels"):  # the package's own names, and a folder
            continue
        assert layer(name) is not None, f"frame_gdn.{name} has no place in ORDER"
        for target in imported("frame_gdn", name, tree):
            below = layer(target.removeprefix("frame_gdn.")) if target.startswith("frame_gdn.") else None
            assert below is None or below <= layer(name), f"frame_gdn.{name} imports {target}"


@pytest.mark.parametrize("folder", ["frame_gdn", *ABOVE])
def test_nothing_below_imports_what_is_written_from_it(folder):
    above = {"frame_gdn", "models", "training", "train", "rollout", "benchmarks", "tests"} - {folder}
    for name, tree in sources(folder):
        for target in imported(folder, name, tree):
            root = target.split(".")[0]
            assert root not in above or root in ABOVE.get(folder, set()), f"{folder}.{name} imports {target}"


def test_only_the_kernels_folder_imports_triton():
    for folder in ("frame_gdn", *ABOVE):
        for name, tree in sources(folder):
            if folder != "frame_gdn" or not f"{name}.".startswith("kernels.triton."):
                roots = {target.split(".")[0] for target in imported(folder, name, tree)}
                assert "triton" not in roots, f"{folder}.{name}"


def test_a_file_is_read_in_one_sitting():
    for path in (ROOT / "frame_gdn").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= MOST_LINES, path


def functions(tree: ast.AST, inside: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with its name in the module."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        name = f"{inside}.{node.name}" if named else inside
        if isinstance(node, ast.FunctionDef):
            yield name, node
        yield from functions(node, name)


def is_operator_or_kernel(function: ast.FunctionDef) -> bool:
    """A torch.library operator, whose arguments are a schema, or a kernel of Triton, which is not Python."""
    decorators = [ast.unparse(d) for d in function.decorator_list]
    return any("custom_op" in d or d.startswith("operator(") or d == "triton.jit" for d in decorators)


def is_long_by_right(name: str, function: ast.FunctionDef) -> bool:
    parts = name.split(".")
    names = {name, ".".join([*parts[:-2], "*", parts[-1]])}
    return bool(names & LONG_SIGNATURES) or function.name == "__call__" or is_operator_or_kernel(function)


def test_a_function_has_few_arguments():
    for folder in ("frame_gdn", *ABOVE):
        for module, tree in sources(folder):
            for name, function in functions(tree, module):
                arguments = function.args
                count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
                assert count <= MOST_ARGUMENTS or is_long_by_right(name, function), f"{folder}.{name} has {count}"


def test_forward_is_called_on_objects():
    """`super().forward(...)` extends a class; `Class.forward(object, ...)` runs a method that hooks do not see."""
    for folder in ("frame_gdn", *ABOVE):
        for name, tree in sources(folder):
            for node in ast.walk(tree):
                called = node.func if isinstance(node, ast.Call) else None
                if isinstance(called, ast.Attribute) and called.attr == "forward":
                    assert ast.unparse(called.value) == "super()", f"{folder}.{name}, line {node.lineno}"
