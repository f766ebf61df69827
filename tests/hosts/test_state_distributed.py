"""A host's state made by several ranks and continued by one."""

import pytest
import torch
import torch.distributed as dist

from frame_gdn import parallelize
from tests.distributed.helpers import run_ranks, split
from tests.helpers import relative_error

pytest.importorskip("diffusers", minversion="0.42")

from frame_gdn.hosts import sana_wm as sana_wm_host
from tests.hosts.test_state import HOSTS, clip_inputs, cut, rolling_model

#: By number of ranks, their frames of a prefix of 7: a shard shorter than a convolution's reach, a chunk over two.
SHARDS = {2: [6, 1], 3: [1, 4, 2]}


@torch.no_grad()
def prefix_then_alone(rank: int, size: int) -> dict[str, list[float]]:
    sana_wm_host.HALF = torch.float32
    errors = {}
    for host, options in [(host, {}) for host in HOSTS] + [("sana_wm", {"camera_conv_past": False})]:
        inputs = clip_inputs(host)
        model = rolling_model(host, **options)
        expected = model(**cut(host, inputs, 0, 7), output_state=True)
        rest = model(**cut(host, inputs, 7, 10), state=expected.state).sample
        own = split(7, SHARDS[size], rank)
        parallelize(model, dist.group.WORLD)
        out = model(**cut(host, inputs, own.start, own.stop), output_state=True)
        with pytest.raises(ValueError, match="state continues a rollout in one process"):
            model(**cut(host, inputs, 7, 10), state=out.state)
        parallelize(model, None)
        alone = model(**cut(host, inputs, 7, 10), state=out.state).sample
        errors[f"{host} {options}"] = [
            relative_error(out.sample, expected.sample[:, :, own]),
            relative_error(alone, rest),
            *(
                relative_error(ours[name], tensor)
                for ours, block in zip(out.state.blocks, expected.state.blocks, strict=True)
                for name, tensor in block.items()
            ),
        ]
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("size", SHARDS)
def test_a_prefix_over_ranks_and_then_one_rank(size: int) -> None:
    for errors in run_ranks(size, prefix_then_alone):
        for case, found in errors.items():
            assert max(found) <= 1e-5, (case, found)
