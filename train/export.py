"""Weights in and out: our checkpoints, open_clip's folders, bare state dicts. STAGE `export`.

In:  `load_weights(path)` reads a checkpoint or run folder of ours (or the URL of checkpoints), an open_clip folder, a
     .safetensors file, a .pt state dict (open_clip's or OpenAI's).
Out: `open_clip_config.json` and `open_clip_model.safetensors`, which `open_clip.create_model("local-dir:OUT")` loads; or one
     .pt file.

Parameter names are open_clip's everywhere, so nothing is renamed on the way.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, DataError, InputError
from core.storage import Folder
from train import checkpoint
from train.config import ExportConfig
from train.models import RESNET_EXPANSION, RESNET_STRIDE, ModelConfig, model_config, param_count

if TYPE_CHECKING:
    from torch import Tensor

    from train.towers import CLIP

log = logging.getLogger("pairmill.train")

CONFIG = "open_clip_config.json"
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
IMAGE_POSITIONS = ("visual.positional_embedding", "visual.attnpool.positional_embedding")

# Numbers and buffers that OpenAI's files and older open_clip files carry beside the parameters.
OPENAI_MARK = "input_resolution"
NOT_PARAMETERS = frozenset({OPENAI_MARK, "context_length", "vocab_size", "attn_mask"})

# Types of the tensors in a TorchScript archive.
STORAGES = {
    "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "DoubleStorage": "float64",
    "LongStorage": "int64", "IntStorage": "int32", "BoolStorage": "bool",
}  # fmt: skip

# What a plain ViT of open_clip may say of itself: the sizes, what only training or another pooling reads, and the rest
# at its default. Much of the rest shows in no tensor's shape, and a model built without it embeds nonsense.
READ_OR_UNUSED = frozenset(
    {"image_size", "layers", "width", "head_width", "patch_size", "context_length", "vocab_size", "heads",
     "patch_dropout", "attn_pooler_queries", "attn_pooler_heads", "output_tokens"}
)  # fmt: skip
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "mlp_ratio": (4.0,), "pool_type": ("tok", "argmax"), "pos_embed_type": ("learnable",), "proj_type": ("linear",),
}  # fmt: skip


@dataclass
class Weights:
    """Parameters by open_clip's names, and the shape they are of where the file says it."""

    source: str
    state: dict[str, Tensor]
    shape: ModelConfig | None
    meta: dict[str, Any]

    def into(self, model: CLIP) -> None:
        """Fill `model`. A missing SigLIP bias keeps its initial value, a surplus one is left out; the positions of
        another picture size are interpolated.

        Raises:
            ConfigError: names or shapes differ; the first difference is named.
        """
        own = model.state_dict()
        state = {name: value for name, value in self.state.items() if name in own or name != "logit_bias"}
        for name in IMAGE_POSITIONS:
            if name in own and name in state:
                state[name] = resize_positions(state[name], len(own[name]))
        for name in sorted(set(own) | set(state)):
            mine, theirs = _shape_of(own, name), _shape_of(state, name)
            if mine != theirs and not (name == "logit_bias" and theirs is None):
                raise ConfigError(
                    f"{self.source} holds the weights of another model: {name} is {theirs or 'missing'} there and "
                    f"{mine or 'unknown'} here; choose the --model it was trained as"
                )
        for name in ("vision_heads", "text_heads"):  # which show in no tensor's shape
            if self.shape is not None and getattr(self.shape, name) != getattr(model.cfg, name):
                raise ConfigError(
                    f"{self.source} holds the weights of another model: {name} is {getattr(self.shape, name)} there and "
                    f"{getattr(model.cfg, name)} here; choose the --model it was trained as"
                )
        model.load_state_dict({**own, **state})


def resize_positions(positions_PD: Tensor, count: int) -> Tensor:
    """Positions of a square grid, the class token's or mean's first, as those of a square grid of `count` - 1.

    Bicubic with antialiasing, as open_clip does it. Numbers that belong to no square come back as they are.
    """
    import torch
    from torch.nn import functional as F

    old, new = math.isqrt(len(positions_PD) - 1), math.isqrt(count - 1)
    if old == new or old**2 + 1 != len(positions_PD) or new**2 + 1 != count:
        return positions_PD
    grid_1DHW = positions_PD[1:].T.reshape(1, -1, old, old)
    grid_1DHW = F.interpolate(grid_1DHW, (new, new), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([positions_PD[:1], grid_1DHW.flatten(2)[0].T])


def _shape_of(state: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None


def load_weights(path: str, model: str = "") -> Weights:
    """Read weights from any of the forms above; `model` names the shape of a bare state dict.

    Raises:
        InputError: nothing is there, or the file is none of these forms.
        DataError: a checkpoint of ours is damaged.
    """
    place = Path(path)
    if "://" in path:
        saved = checkpoint.load(path) if Folder(path).exists(checkpoint.MARKER) else checkpoint.newest(path)
        if saved is not None:
            return _from_checkpoint(saved)
    if not place.exists():
        raise InputError(f"expected weights at {path}, found nothing")
    if place.is_file():
        found = _read_file(place)
        shape = model_config(model) if model else None
        if shape is not None and OPENAI_MARK in found:
            shape = dataclasses.replace(shape, quick_gelu=True)
        return Weights(path, _clean(found), shape, {})
    if (place / CONFIG).exists():
        return _from_open_clip(place)
    if (place / checkpoint.MARKER).exists():
        return _from_checkpoint(checkpoint.load(place))
    for home in (str(place / "checkpoints"), path, *_checkpoints_elsewhere(place)):
        if (saved := checkpoint.newest(home)) is not None:
            return _from_checkpoint(saved)
    raise InputError(
        f"expected a checkpoint, a run folder or an open_clip folder at {path}, found none of them; a checkpoint lies in "
        "WORK/runs/NAME/checkpoints"
    )


def _checkpoints_elsewhere(run: Path) -> list[str]:
    """The place that a run was told to keep its checkpoints in, if it was."""
    try:
        place = json.loads((run / "config.json").read_text())["as_run"]["checkpoints"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [place] if place else []


def _from_checkpoint(saved: checkpoint.Saved) -> Weights:
    return Weights(str(saved.path), {**saved.model, **saved.average}, saved.shape, saved.meta)


def _from_open_clip(place: Path) -> Weights:
    for name in WEIGHTS:
        if (place / name).exists():
            try:
                config = json.loads((place / CONFIG).read_text())
                shape = shape_from_open_clip(config["model_cfg"])
                _check_pixels(config.get("preprocess_cfg") or {})
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{place / CONFIG} describes no model that can be built here: {error!r}") from error
            return Weights(str(place), _clean(_read_file(place / name)), shape, {})
    raise InputError(f"expected {' or '.join(WEIGHTS)} beside {place / CONFIG}, found neither")


def _read_file(path: Path) -> Mapping[str, Any]:
    """State dict of a file: safetensors, a pickle of tensors only, or OpenAI's TorchScript archive."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise DataError(f"{path} is damaged: {error}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it was given an archive, which is read next
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler stumbles over
        return _read_torchscript(path, error)
    found = found.get("state_dict", found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InputError(f"expected a state dict in {path}, found {type(found).__name__}")
    return found


def _read_torchscript(path: Path, earlier: Exception) -> Mapping[str, Any]:
    """The tensors of OpenAI's archive, read as data.

    `torch.jit.load` would build the program that the archive holds, and may run parts of it; here nothing of it is.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            root = _ArchiveReader(archive, pickled).load()
            return dict(_attributes("", root))
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, KeyError, AttributeError, EOFError, TypeError):
        reason = str(earlier).split("\n")[0][:200]
        raise InputError(f"expected weights in {path}, found a file that holds more or none: {reason}") from earlier


class _Module:
    """Stands for any class of a TorchScript archive: the attributes, without the class."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class _ArchiveReader(pickle.Unpickler):
    """Unpickles a TorchScript archive's data.pkl into `_Module`s, tensors and plain values; refuses every other name."""

    def __init__(self, archive: zipfile.ZipFile, pickled: str) -> None:
        super().__init__(io.BytesIO(archive.read(pickled)))
        self._archive, self._root = archive, pickled.removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module.startswith("__torch__"):
            return _Module
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _strided
        if module == "torch" and name in STORAGES:
            return getattr(torch, STORAGES[name])
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch.jit._pickle":  # lists and dicts with a mark of their type
            return lambda value, *_: value
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a model's weights")

    def persistent_load(self, pid: Any) -> Tensor:
        import torch

        _, dtype, key, _, count = pid
        values = torch.frombuffer(bytearray(self._archive.read(f"{self._root}data/{key}")), dtype=dtype)
        return values[:count]


def _strided(values: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return values.as_strided(size, stride, offset)


def _attributes(prefix: str, module: _Module) -> Iterator[tuple[str, Any]]:
    """Names as a state dict has them, and tensors and numbers."""
    for name, value in vars(module).items():
        if isinstance(value, _Module):
            yield from _attributes(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _clean(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Only parameters, in fp32, and the counters of normalisations, without the prefix that DDP leaves."""
    import torch

    return {
        name.removeprefix("module."): value.float() if value.is_floating_point() else value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name.removeprefix("module.") not in NOT_PARAMETERS
    }


# -- open_clip's description of a model --------------------------------------------------------------------------------


def open_clip_config(shape: ModelConfig, *, bias: bool = False) -> dict[str, Any]:
    """`open_clip_config.json` of a shape; `bias` where the weights hold SigLIP's second scalar."""
    from train.towers import IMAGE_MEAN, IMAGE_STD, INITIAL_BIAS

    return {
        "model_cfg": {
            "embed_dim": shape.embed_dim,
            "quick_gelu": shape.quick_gelu,
            **({"init_logit_bias": INITIAL_BIAS} if bias else {}),
            "vision_cfg": {
                "image_size": shape.image_size,
                "layers": shape.vision_layers if isinstance(shape.vision_layers, int) else list(shape.vision_layers),
                "width": shape.vision_width,
                "head_width": shape.pooled_width // shape.vision_heads,
                "patch_size": None if shape.is_resnet else shape.patch,
            },
            "text_cfg": {
                "context_length": shape.context,
                "vocab_size": shape.vocab,
                "width": shape.text_width,
                "heads": shape.text_heads,
                "layers": shape.text_layers,
            },
        },
        "preprocess_cfg": {"mean": list(IMAGE_MEAN), "std": list(IMAGE_STD), "interpolation": "bicubic"},
    }


def shape_from_open_clip(config: Mapping[str, Any]) -> ModelConfig:
    """The shape that a `model_cfg` of open_clip describes.

    KeyError, TypeError or ValueError where it is neither a plain ViT nor CLIP's ResNet.
    """
    vision, text = config["vision_cfg"], config["text_cfg"]
    for key, value in [*vision.items(), *text.items()]:
        if value and key not in READ_OR_UNUSED and value not in DEFAULTS.get(key, ()):
            raise ValueError(f"{key} = {value!r} makes it another model than a plain ViT")
    layers = vision["layers"]
    resnet = isinstance(layers, list)
    return ModelConfig(
        embed_dim=config["embed_dim"],
        image_size=vision["image_size"],
        patch=RESNET_STRIDE if resnet else vision["patch_size"],
        vision_width=vision["width"],
        vision_layers=tuple(layers) if resnet else int(layers),
        vision_heads=vision["width"] * (8 * RESNET_EXPANSION if resnet else 1) // vision.get("head_width", 64),
        text_width=text["width"],
        text_layers=text["layers"],
        text_heads=text["heads"],
        context=text.get("context_length", 77),
        vocab=text.get("vocab_size", 49408),
        quick_gelu=bool(config.get("quick_gelu", False)),
    )


def _check_pixels(config: Mapping[str, Any]) -> None:
    """ValueError where a model wants its pixels scaled otherwise than every tower here scales them."""
    from train.towers import IMAGE_MEAN, IMAGE_STD

    for key, ours in (("mean", IMAGE_MEAN), ("std", IMAGE_STD)):
        theirs = config.get(key) or ours
        if len(theirs) != 3 or any(abs(a - b) > 1e-3 for a, b in zip(theirs, ours, strict=True)):
            raise ValueError(f"its pixels are scaled by the {key} {theirs}, not by CLIP's {list(ours)}")


# -- the stage ---------------------------------------------------------------------------------------------------------


def run(config: ExportConfig) -> dict[str, Any]:
    """Write a checkpoint as an open_clip folder, or as a single state dict.

    Returns `out`, `files`, `step`, `parameters`.
    """
    weights = load_weights(config.checkpoint or run_folder(config.work, config.name))
    if weights.shape is None:
        raise ConfigError(f"{weights.source} does not say which model it is of; export a checkpoint of ours")
    bias = "logit_bias" in weights.state
    out = config.out or f"{run_folder(config.work, config.name)}/export"
    if out.endswith(".pt"):
        import torch

        packed = io.BytesIO()  # torch's own writer has an error of its own for a full disk
        torch.save(weights.state, packed)
        folder, _, name = out.rpartition("/")
        Folder(folder or ".").write(name, packed.getvalue())
        files = [name]
    else:
        home = Folder(out)
        home.make()
        checkpoint.write_tensors(home, WEIGHTS[0], weights.state)
        home.write(CONFIG, json.dumps(open_clip_config(weights.shape, bias=bias), indent=2).encode())
        files = [WEIGHTS[0], CONFIG]
    parameters = param_count(weights.shape) + bias
    return {"out": str(Folder(out)), "files": files, "step": weights.meta.get("step"), "parameters": parameters}


def run_folder(work: str, name: str) -> str:
    """WORK/runs/NAME; ConfigError where that cannot be a folder of its own on this machine."""
    if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
        raise ConfigError(f"expected a --name of letters, digits, '-', '_', '.', '+', found {name!r}")
    folder = Folder(work)
    if folder.local is None:
        raise ConfigError(
            f"runs are kept on this machine's disk, found --work {work}; give a local one, and name the shards with --shards"
        )
    return f"{folder}/runs/{name}"
