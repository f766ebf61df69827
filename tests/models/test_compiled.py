"""A VideoDiT under torch.compile and torch.export, for clips of any length."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.helpers import relative_error
from tests.models.helpers import gradients, tiny_inputs, tiny_model, weighted_sum


@pytest.mark.parametrize("softmax_every_n", [0, 1], ids=["gdn", "softmax"])
def test_one_dynamic_graph_serves_every_length(softmax_every_n):
    torch.compiler.reset()
    model = tiny_model(torch.float32, num_layers=1, softmax_every_n=softmax_every_n)
    plain = tiny_model(torch.float32, num_layers=1, softmax_every_n=softmax_every_n)
    graphs = CompileCounter()
    model.compile_repeated_blocks(fullgraph=True, backend=graphs)
    counts = []
    for T in (2, 3, 4, 5, 6, 7, 9, 11):
        inputs = tiny_inputs(T, torch.float32, batch=1)
        with torch.no_grad():
            assert relative_error(model(**inputs).sample, plain(**inputs).sample) <= 1e-6
        counts.append(graphs.frame_count)
    assert counts[1:] == [counts[1]] * 7, "a length that is new makes a graph that is new"


def test_a_compiled_training_step_has_the_gradients_of_a_plain_one():
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        model = tiny_model(torch.float32, num_layers=2)
        model.train().enable_gradient_checkpointing()
        if compiled:
            model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        weighted_sum(model(**tiny_inputs(3, torch.float32, batch=1)).sample).backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert relative_error(found[1][name], gradient) <= 1e-5, name


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_exported_program_takes_every_length(strict):
    model = tiny_model(torch.float32, num_layers=2).eval()
    inputs = {**tiny_inputs(5, torch.float32), "return_dict": False}
    frames = torch.export.Dim("frames", min=2, max=256)
    dynamic = dict.fromkeys(inputs) | {"hidden_states": {2: frames}, "timestep": {1: frames}}
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic, strict=strict).module()
        for T in (2, 7, 12):
            inputs = tiny_inputs(T, torch.float32)
            assert relative_error(program(**inputs, return_dict=False)[0], model(**inputs).sample) <= 1e-6
