"""SANA-WM's streaming checkpoint, in the layout of the release, to a diffusers folder and back."""

import json

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.42")

from frame_gdn import FrameGDNRolloutPipeline, convert
from frame_gdn.convert import RENAMED, SIGMAS, STREAMING, from_diffusers, main, to_diffusers
from frame_gdn.hosts.sana_wm import SanaWMTransformer3DModel

from .hosts.sana_wm import TINY, tiny_inputs, tiny_model

CONFIG = {**TINY, "softmax_every_n": 2, "chunk_plucker_channels": 48}


def released(model, **changes):
    """The file as NVlabs' trainer writes it: a generator, a critic and their optimizers, prefixed names."""
    names = {ours: theirs for theirs, ours in RENAMED.items()}
    generator = {f"model.{convert.renamed(n, names)}": t.clone() for n, t in model.state_dict().items()}
    generator["model.pos_embed"] = torch.zeros(1, 9, 32)
    generator["model.y_embedder.y_embedding"] = torch.randn(6, 8)
    generator.update(changes)
    return {
        "generator": generator,
        "critic": {name: torch.zeros(1) for name in generator},
        "generator_optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-5}]},
        "step": 3,
    }


@pytest.fixture(scope="module")
def model():
    return tiny_model(**CONFIG)


@pytest.fixture
def checkpoint(model, tmp_path):
    torch.save(released(model), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_the_names_are_those_of_the_release():
    """As the release's loaders list them."""
    assert convert.renamed("t_embedder.mlp.0.weight") == "t_embedder.linear_1.weight"
    assert convert.renamed("t_embedder.mlp.2.bias") == "t_embedder.linear_2.bias"
    assert convert.renamed("blocks.3.mlp.t_conv.weight") == "blocks.3.mlp.t_conv.weight"


def test_the_folder_loads_as_a_streaming_model_with_equal_weights(model, checkpoint, tmp_path):
    to_diffusers(checkpoint, tmp_path / "out", config=CONFIG)
    loaded = SanaWMTransformer3DModel.from_pretrained(tmp_path / "out" / "transformer")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    for name, value in STREAMING.items():
        assert loaded.config[name] == value, name
    assert loaded.config.softmax_scale == 128**-0.5  # NVlabs pads heads of 16 to 128
    pipe = FrameGDNRolloutPipeline.from_pretrained(tmp_path / "out")
    assert type(pipe.transformer) is SanaWMTransformer3DModel
    assert pipe.scheduler.config.shift == 1.0
    film = roll_out(pipe, tiny_inputs(frames=1, batch=1, camera=False)).latents
    assert film.shape == (1, 4, 7, 4, 3) and film.isfinite().all()


def roll_out(pipe, inputs):
    """Chunks of 4 and 3 frames from the first, at the released noise levels, along a camera that moves ahead."""
    poses = torch.eye(4).repeat(1, 49, 1, 1)
    poses[..., 2, 3] = 0.1 * torch.arange(49)
    camera = poses, torch.tensor([60.0, 60.0, 64.0, 64.0])
    pipe.set_progress_bar_config(disable=True)
    first, text = inputs["hidden_states"][:, :, :1], inputs["encoder_hidden_states"][:, 0]
    return pipe(first_frames=first, num_chunks=2, sigmas=list(SIGMAS), prompt_embeds=text, camera=camera)


def test_there_and_back_gives_the_file_again(checkpoint, tmp_path):
    to_diffusers(checkpoint, tmp_path / "out", config=CONFIG)
    lacking = from_diffusers(tmp_path / "out", tmp_path / "back.pt", original=checkpoint)
    before, after = (torch.load(f, weights_only=True)["generator"] for f in (checkpoint, tmp_path / "back.pt"))
    assert not lacking and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert from_diffusers(tmp_path / "out" / "transformer", tmp_path / "less.pt") == list(convert.DROPPED)


def test_matrices_of_the_release_become_convolutions_of_one_pixel(model, tmp_path):
    name = "model.blocks.0.mlp.point_conv.conv.weight"
    flat = released(model)["generator"][name].flatten(1)
    torch.save(released(model, **{name: flat}), tmp_path / "model.pt")
    loaded = to_diffusers(tmp_path / "model.pt", tmp_path / "out", config=CONFIG)
    assert torch.equal(loaded.state_dict()[name.removeprefix("model.")].flatten(1), flat)


def test_dtype_casts_all_but_the_decay(checkpoint, tmp_path):
    loaded = to_diffusers(checkpoint, tmp_path / "out", config=CONFIG, dtype=torch.bfloat16)
    dtypes = {name.rsplit(".", 1)[-1]: t.dtype for name, t in loaded.state_dict().items()}
    assert dtypes["A_log"] == dtypes["dt_bias"] == torch.float32
    assert dtypes["weight"] == torch.bfloat16


def test_all_names_that_do_not_fit_are_listed(model, tmp_path):
    saved = released(model, **{"model.extra": torch.zeros(1), "model.x_embedder.proj.bias": torch.zeros(5)})
    del saved["generator"]["model.blocks.1.attn.A_log"]
    torch.save(saved, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"(?s)missing.*blocks.1.attn.A_log.*unexpected.*extra.*proj.bias \(5,\)"):
        to_diffusers(tmp_path / "model.pt", tmp_path / "out", config=CONFIG)
    assert not (tmp_path / "out").exists()


class Planted:
    def __reduce__(self):
        return eval, ("1/0",)


def bad_files(folder, model):
    torch.save({"generator": Planted()}, folder / "planted.pt")
    torch.save({"model": {}}, folder / "other.pt")
    torch.save({"generator": {"model.a": 1}}, folder / "number.pt")
    torch.save({"generator": {"model.a": torch.zeros(1), "a": torch.zeros(1)}}, folder / "twice.pt")
    (folder / "text.pt").write_text("not a checkpoint")
    torch.save(released(model), folder / "whole.pt")
    (folder / "cut.pt").write_bytes((folder / "whole.pt").read_bytes()[:-2000])
    return ["planted.pt", "other.pt", "number.pt", "twice.pt", "text.pt", "cut.pt", "absent.pt"]


def test_a_file_that_is_no_checkpoint_is_one_line_that_names_it(model, tmp_path, capsys):
    for name in bad_files(tmp_path, model):
        with pytest.raises(SystemExit) as stop:
            main(["sana_wm_streaming", str(tmp_path / name), str(tmp_path / "out")])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1 and name in error, error
        assert not (tmp_path / "out").exists()


def test_the_command_line_converts_there_and_back(checkpoint, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out, back = tmp_path / "out", tmp_path / "back.pt"
    main(["sana_wm_streaming", str(checkpoint), str(out), "--config", str(tmp_path / "config.json")])
    main(["to_sana_wm_streaming", str(out), str(back)])
    assert "without pos_embed" in capsys.readouterr().out
    for again in (
        ["sana_wm_streaming", str(checkpoint), str(out)],
        ["to_sana_wm_streaming", str(out), str(back)],
        ["to_sana_wm_streaming", str(tmp_path), str(tmp_path / "new.pt")],
    ):
        with pytest.raises(SystemExit) as stop:
            main(again)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
