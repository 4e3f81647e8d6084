"""Checkpoints: what is read back, what damage does, and what a resume refuses. Weights in and out of open_clip's forms."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import pickle
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.errors import ConfigError, DataError, InputError, StorageError, WorkFolderError
from core.storage import Folder
from train import checkpoint
from train.config import ExportConfig, TrainConfig
from train.export import IMAGE_POSITIONS, Weights, load_weights, open_clip_config, run_folder, shape_from_open_clip
from train.export import run as export
from train.models import MODELS, model_config
from train.optim import make_optimizer
from train.towers import CLIP

SHAPE = dataclasses.replace(model_config("test-32"), vocab=500)
META: dict[str, Any] = {
    "data": "d1", "tokenizer": "t1", "model": dataclasses.asdict(SHAPE), "model_name": "test-32", "loss": "clip",
    "batch_size": 8, "seed": 0, "lanes": 8, "epoch": 0, "samples_seen": 24,
}  # fmt: skip


def make(steps: int = 3) -> tuple[CLIP, torch.optim.Optimizer]:
    """A small model after a few steps."""
    torch.manual_seed(0)
    model = CLIP(SHAPE)
    optimizer = make_optimizer(model, 1e-3)
    for _ in range(steps):
        take_step(model, optimizer)
    return model, optimizer


def take_step(model: CLIP, optimizer: torch.optim.Optimizer) -> None:
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    tokens = torch.randint(1, 400, (4, 9))
    tokens[:, 8] = 499
    optimizer.zero_grad()
    img, txt = model(pixels, tokens)
    (model.logit_scale.exp() * (img @ txt.T)).sum().backward()
    optimizer.step()


def write(home: Path, *steps: int) -> tuple[CLIP, torch.optim.Optimizer]:
    model, optimizer = make()
    for step in steps:
        checkpoint.save(home, step, model, optimizer, META)
    return model, optimizer


def test_a_restored_optimiser_takes_the_same_next_step_to_the_bit(tmp_path: Path) -> None:
    model, optimizer = write(tmp_path, 3)
    saved = checkpoint.load(tmp_path / "step_00000003")
    other, fresh = make(steps=0)
    other.load_state_dict(saved.model)
    checkpoint.restore_optimizer(other, fresh, saved.optimizer)
    for one, two in ((model, optimizer), (other, fresh)):
        torch.manual_seed(5)
        take_step(one, two)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    bare, empty = make(steps=0)
    bare.load_state_dict(saved.model)
    torch.manual_seed(5)
    take_step(bare, empty)
    assert not torch.equal(bare.visual.proj, model.visual.proj)  # so the moments are what made the steps equal


def test_restoring_does_not_share_memory_with_the_file(tmp_path: Path) -> None:
    write(tmp_path, 3)
    saved = checkpoint.load(tmp_path / "step_00000003")
    before = {name: value.clone() for name, value in saved.optimizer.items()}
    model, optimizer = make(steps=0)
    checkpoint.restore_optimizer(model, optimizer, saved.optimizer)
    take_step(model, optimizer)
    assert all(torch.equal(saved.optimizer[name], value) for name, value in before.items())


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZER])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_newest_checkpoint_falls_back_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    write(tmp_path, 10, 20)
    file = tmp_path / "step_00000020" / name
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data if damage == "flip" else data[:-9])
    with caplog.at_level(logging.ERROR):
        saved = checkpoint.newest(tmp_path)
    assert saved is not None and saved.step == 10
    assert "step_00000020" in caplog.text and "damaged" in caplog.text and "falling back" in caplog.text


def test_when_all_are_damaged_the_run_does_not_silently_start_over(tmp_path: Path) -> None:
    write(tmp_path, 10, 20)
    for step in (10, 20):
        (tmp_path / f"step_{step:08d}" / checkpoint.MARKER).write_text("{")
    with pytest.raises(DataError, match=r"all 2 checkpoints .* damaged; start the run over with --fresh"):
        checkpoint.newest(tmp_path)


def test_an_unfinished_checkpoint_does_not_count_and_is_swept(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    write(tmp_path, 10)
    (tmp_path / "step_00000020").mkdir()
    (tmp_path / "step_00000020" / checkpoint.MODEL).write_bytes(b"half a file")
    saved = checkpoint.newest(tmp_path)
    assert saved is not None and saved.step == 10
    checkpoint.prune(tmp_path, 10, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000010"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 5, 10, 15, 20)
    checkpoint.prune(tmp_path, 20, 2)
    assert checkpoint.steps_saved(tmp_path) == [15, 20]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000015", "step_00000020"]


def test_a_copy_that_someone_made_beside_them_is_no_checkpoint_and_stays(tmp_path: Path) -> None:
    write(tmp_path, 10, 20)
    for name in ("step_00000010_copy", "step_00000020.good", "step_best"):
        shutil.copytree(tmp_path / "step_00000010", tmp_path / name)
    assert checkpoint.steps_saved(tmp_path) == [10, 20]
    checkpoint.prune(tmp_path, 20, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_00000010_copy",
        "step_00000020",
        "step_00000020.good",
        "step_best",
    ]


def test_every_so_many_steps_one_is_kept_for_good(tmp_path: Path) -> None:
    write(tmp_path, 4, 6, 8, 10, 12, 14)
    checkpoint.prune(tmp_path, 14, 2, 4)
    assert checkpoint.steps_saved(tmp_path) == [4, 8, 12, 14]


def test_what_is_written_in_the_background_is_what_was_there_when_it_began(tmp_path: Path) -> None:
    model, optimizer = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    writer = checkpoint.Writer(tmp_path, keep=2)
    for step in (1, 2, 3):
        writer.save(step, checkpoint.snapshot(model, optimizer), META)
        take_step(model, optimizer)
        if step == 1:
            writer.finish()
            first = checkpoint.load(tmp_path / "step_00000001")
            assert all(torch.equal(first.model[name], value) for name, value in before.items())
    writer.finish()
    assert checkpoint.steps_saved(tmp_path) == [2, 3]
    assert writer.path(3) == str(tmp_path / "step_00000003")


def test_a_run_that_fell_back_keeps_its_new_checkpoints_rather_than_the_damaged_later_ones(tmp_path: Path) -> None:
    model, optimizer = write(tmp_path, 10, 20)
    (tmp_path / "step_00000020" / checkpoint.MODEL).write_bytes(b"damaged")
    writer = checkpoint.Writer(tmp_path, keep=1)
    writer.save(15, checkpoint.snapshot(model, optimizer), META)  # by the clock, or with another --checkpoint-every
    writer.finish()
    saved = checkpoint.newest(tmp_path)
    assert saved is not None and saved.step == 15 and not (tmp_path / "step_00000010").exists()
    writer.save(25, checkpoint.snapshot(model, optimizer), META)
    writer.finish()
    assert checkpoint.steps_saved(tmp_path) == [25]


def test_a_fault_of_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    writer = checkpoint.Writer(tmp_path / "file", keep=2)
    writer.save(1, checkpoint.snapshot(*make(0)), META)
    with pytest.raises(StorageError, match="cannot write"):
        writer.finish()
    writer.finish()  # said once


def test_an_older_one_is_found_below_a_step(tmp_path: Path) -> None:
    write(tmp_path, 10, 20, 30)
    found = [checkpoint.newest(tmp_path, below) for below in (None, 29, 20, 9)]
    assert [saved and saved.step for saved in found] == [30, 20, 20, None]


def test_checkpoints_in_an_object_store_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs, moto = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        store = s3fs.S3FileSystem()
        store.mkdir("runs")
        model, optimizer = make()
        writer = checkpoint.Writer("s3://runs/a", keep=2)
        for step in (1, 2, 3):
            writer.save(step, checkpoint.snapshot(model, optimizer), META)
        writer.finish()
        assert checkpoint.steps_saved("s3://runs/a") == [2, 3]
        assert all(same(model, place) for place in ("s3://runs/a", writer.path(2)))
        saved = checkpoint.newest("s3://runs/a")
        assert saved is not None and saved.path == writer.path(3) == "s3://runs/a/step_00000003"
        assert all(torch.equal(saved.model[name], value) for name, value in model.state_dict().items())
        store.pipe_file("runs/a/step_00000003/model.safetensors", b"cut")
        saved = checkpoint.newest("s3://runs/a")
        assert saved is not None and saved.step == 2
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


@pytest.mark.parametrize(("key", "words"), list(checkpoint.FIXED.items()))
def test_a_resume_with_anything_else_is_refused_by_name(tmp_path: Path, key: str, words: str) -> None:
    write(tmp_path, 3)
    saved = checkpoint.load(tmp_path / "step_00000003")
    checkpoint.check_same(saved, META)
    with pytest.raises(WorkFolderError, match=f"other values of {words} .*now other.*--fresh"):
        checkpoint.check_same(saved, {**META, key: "other"})


def test_a_resume_with_another_setting_is_refused_and_a_setting_or_field_new_since_then_was_at_its_default(
    tmp_path: Path,
) -> None:
    model, optimizer = make(1)
    begun = TrainConfig(lr=0.1).fingerprint()
    older = {key: value for key, value in begun.items() if key != "ema"}
    shape = {key: value for key, value in META["model"].items() if key != "patch_dropout"}
    path = checkpoint.save(tmp_path, 3, model, optimizer, {**META, "model": shape, checkpoint.SETTINGS: older})
    saved = checkpoint.load(path)
    checkpoint.check_same(saved, {**META, checkpoint.SETTINGS: begun})
    for key, other in (("ema", 0.9), ("lr", 0.2)):
        with pytest.raises(WorkFolderError, match=rf"other values of {key} \(was .*, now {other}\).*--fresh"):
            checkpoint.check_same(saved, {**META, checkpoint.SETTINGS: {**begun, key: other}})


@pytest.mark.parametrize(
    "marker", ['{"sha256": {}}', "[]", "", '{"sha256": 3, "step": 1}', '{"sha256": {}, "step": "x"}']
)
def test_a_marker_that_says_too_little_is_a_damaged_checkpoint(tmp_path: Path, marker: str) -> None:
    write(tmp_path, 1)
    (tmp_path / "step_00000001" / checkpoint.MARKER).write_text(marker)
    with pytest.raises(DataError, match="damaged"):
        checkpoint.load(tmp_path / "step_00000001")


# -- weights in and out ------------------------------------------------------------------------------------------------


def place_run(work: Path) -> CLIP:
    return write(Path(run_folder(str(work), "main")) / "checkpoints", 2, 3)[0]


def same(model: CLIP, path: Path | str, name: str = "") -> bool:
    other = CLIP(SHAPE)
    load_weights(str(path), name).into(other)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_every_form_of_weights_loads_back_the_same(tmp_path: Path) -> None:
    model = place_run(tmp_path)
    out = tmp_path / "out"
    summary = export(ExportConfig(work=str(tmp_path), out=str(out)))
    assert summary["step"] == 3 and sorted(p.name for p in out.iterdir()) == sorted(summary["files"])
    assert export(ExportConfig(work=str(tmp_path), out=str(tmp_path / "one.pt")))["files"] == ["one.pt"]
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    forms = [tmp_path / "runs/main", tmp_path / "runs/main/checkpoints", tmp_path / "runs/main/checkpoints/step_00000003",
             out, out / "open_clip_model.safetensors", tmp_path / "one.pt"]  # fmt: skip
    assert all(same(model, form) for form in forms)
    assert load_weights(str(out)).shape == SHAPE
    ddp = {"state_dict": {f"module.{name}": value for name, value in model.state_dict().items()}, "epoch": 3}
    torch.save(ddp, tmp_path / "ddp.pt")
    assert same(model, tmp_path / "ddp.pt")


class Branch(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def openai_archive(model: CLIP, path: Path) -> None:
    """TorchScript with fp16 weights below modules of the same names, and the numbers that OpenAI's archives carry."""
    root = Branch()
    for name, value in model.state_dict().items():
        *parents, leaf = name.split(".")
        at = root
        for parent in parents:
            if parent not in dict(at.named_children()):
                at.add_module(parent, Branch())
            at = at.get_submodule(parent)
        at.register_parameter(leaf, torch.nn.Parameter(value.half()))
    for name, number in (("input_resolution", 32), ("context_length", 77), ("vocab_size", 500)):
        root.register_buffer(name, torch.tensor(number))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out; the archives stay
        torch.jit.save(torch.jit.script(root), str(path))


def test_an_openai_archive_gives_the_embeddings_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    source = CLIP(dataclasses.replace(SHAPE, quick_gelu=True)).eval()
    openai_archive(source, tmp_path / "openai.pt")
    monkeypatch.setattr(torch.jit, "load", None)  # nothing of the archive is built or run
    weights = load_weights(str(tmp_path / "openai.pt"), "test-32")
    assert weights.shape is not None and weights.shape.quick_gelu
    assert set(weights.state) == set(source.state_dict()) and weights.state["visual.proj"].dtype == torch.float32
    loaded = CLIP(dataclasses.replace(SHAPE, quick_gelu=True)).eval()
    weights.into(loaded)
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    tokens = torch.tensor([[1, 5, 9, 499], [1, 499, 0, 0], [1, 7, 499, 0], [1, 8, 8, 499]])
    with torch.no_grad():
        for ours, theirs in zip(loaded(pixels, tokens), source(pixels, tokens), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    for name, value in source.state_dict().items():
        assert torch.equal(weights.state[name], value.half().float()), name


def test_an_archive_that_calls_something_is_refused_and_nothing_called(tmp_path: Path) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "called"),)

    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps(Call(), protocol=2))
        archive.writestr("evil/constants.pkl", b"")
    with pytest.raises(InputError, match="holds more or none"):
        load_weights(str(tmp_path / "evil.pt"), "test-32")
    assert not (tmp_path / "called").exists()


def test_open_clips_config_describes_every_model_of_ours() -> None:
    for shape in MODELS.values():
        assert shape_from_open_clip(json.loads(json.dumps(open_clip_config(shape)))["model_cfg"]) == shape


def describe(folder: Path, **changes: dict[str, Any]) -> Path:
    """An open_clip folder of SHAPE with some of its configuration's tables added to."""
    checkpoint.write_tensors(Folder(folder), "open_clip_model.safetensors", CLIP(SHAPE).state_dict())
    config = open_clip_config(SHAPE)
    tables = {**config["model_cfg"], "preprocess_cfg": config["preprocess_cfg"]}
    for table, values in changes.items():
        tables[table].update(values)
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


def test_what_open_clip_says_at_its_defaults_changes_nothing(tmp_path: Path) -> None:
    vision = {"mlp_ratio": 4.0, "pool_type": "tok", "patch_dropout": 0.5, "no_ln_pre": False, "act_kwargs": None}
    folder = describe(tmp_path, vision_cfg=vision, text_cfg={"pool_type": "argmax", "no_causal_mask": False})
    assert load_weights(str(folder)).shape == SHAPE


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("vision_cfg", "pool_type", "avg"),
        ("vision_cfg", "act_kwargs", {"approximate": "tanh"}),
        ("vision_cfg", "mlp_ratio", 2.0),
        ("text_cfg", "no_causal_mask", True),
        ("text_cfg", "hf_model_name", "roberta-base"),
        ("preprocess_cfg", "mean", [0.5, 0.5, 0.5]),
    ],
)
def test_a_model_that_would_be_built_wrongly_is_refused(tmp_path: Path, table: str, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"describes no model that can be built here.*{key}"):
        load_weights(str(describe(tmp_path, **{table: {key: value}})))


def test_weights_with_other_heads_are_refused_though_all_tensors_fit(tmp_path: Path) -> None:
    weights = load_weights(str(describe(tmp_path)))
    weights.into(CLIP(SHAPE))
    for heads in ({"vision_heads": 4}, {"text_heads": 1}):
        with pytest.raises(ConfigError, match=f"another model: {next(iter(heads))} is 2 there"):
            weights.into(CLIP(dataclasses.replace(SHAPE, **heads)))


def test_siglips_bias_is_announced_to_open_clip_which_else_refuses_the_file(tmp_path: Path) -> None:
    for bias in (False, True):
        model = CLIP(SHAPE, logit_bias=bias)
        home = tmp_path / f"{bias}"
        checkpoint.save(home, 1, model, make_optimizer(model, 1e-3), META)
        export(ExportConfig(checkpoint=str(home), out=str(home / "out")))
        config = json.loads((home / "out/open_clip_config.json").read_text())["model_cfg"]
        state = load_file(home / "out/open_clip_model.safetensors")
        assert ("init_logit_bias" in config) == ("logit_bias" in state) == bias


def test_an_export_onto_a_full_disk_is_a_sentence_and_leaves_no_folder_that_would_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    place_run(tmp_path)
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(StorageError, match="disk is full"):
        export(ExportConfig(work=str(tmp_path), out=str(tmp_path / "out")))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["open_clip_model.safetensors"]
    with pytest.raises(StorageError, match="disk is full"):
        export(ExportConfig(work=str(tmp_path), out=str(tmp_path / "one.pt")))
    assert not (tmp_path / "one.pt").exists()


def test_exported_names_and_shapes_are_the_models(tmp_path: Path) -> None:
    model = place_run(tmp_path)
    export(ExportConfig(work=str(tmp_path), out=str(tmp_path / "out")))
    state = load_file(tmp_path / "out/open_clip_model.safetensors")
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert {"visual.conv1.weight", "transformer.resblocks.1.mlp.c_fc.bias", "logit_scale"} <= set(state)


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    place_run(tmp_path)
    other = CLIP(dataclasses.replace(SHAPE, embed_dim=16))
    with pytest.raises(ConfigError, match=r"another model: \S+ is \(.*\) there and \(.*\) here"):
        load_weights(str(tmp_path / "runs/main")).into(other)


@pytest.mark.parametrize("name", ["test-32", "small-rn-112"])
def test_weights_of_another_picture_size_keep_their_places(name: str) -> None:
    """A ramp over the grid stays that ramp over a finer and a coarser one, and what is not of the grid stays."""
    small = CLIP(MODELS[name])
    key = next(key for key in IMAGE_POSITIONS if key in small.state_dict())
    side = math.isqrt(len(small.state_dict()[key]) - 1)
    state = small.state_dict()
    state[key][1:] = ((torch.arange(side) + 0.5) / side).repeat(side)[:, None]
    state[key][0] = 7.0
    weights = Weights("here", state, None, {})
    for times in (2, 3):
        shape = dataclasses.replace(MODELS[name], image_size=MODELS[name].patch * side * times)
        large = CLIP(shape)
        weights.into(large)
        found = large.state_dict()[key]
        assert torch.equal(found[0], state[key][0])
        grid = found[1:, 0].view(side * times, side * times)
        assert torch.allclose(grid[0], grid[-1])
        middle = slice(times, -times)  # at the edge, bicubic repeats the last value
        truth = (torch.arange(side * times) + 0.5) / (side * times)
        assert torch.allclose(grid[0, middle], truth[middle], atol=0.02)


def test_what_is_no_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected weights at .*nothing"):
        load_weights(str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="expected a checkpoint, a run folder or an open_clip folder"):
        load_weights(str(tmp_path))
    (tmp_path / "bad.pt").write_bytes(b"no pickle at all")
    with pytest.raises(InputError, match=r"expected weights in .*bad\.pt"):
        load_weights(str(tmp_path / "bad.pt"))
    (tmp_path / "bad.safetensors").write_bytes(b"no header")
    with pytest.raises(DataError, match="damaged"):
        load_weights(str(tmp_path / "bad.safetensors"))


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(InputError):
        load_weights(str(tmp_path / "evil.pt"))
    assert not (tmp_path / "ran").exists()


def test_run_names_stay_inside_the_work_folder(tmp_path: Path) -> None:
    for name in ("../x", "a/b", ".hidden", "", "a b"):
        with pytest.raises(ConfigError, match="--name"):
            run_folder(str(tmp_path), name)
    with pytest.raises(ConfigError, match="this machine's disk"):
        run_folder("s3://bucket/work", "main")
