"""`doctor`: what this machine has, what is fast, slow or wrong, and what to do about it.

Each check measures for a fraction of a second and answers with one line. What needs a GPU or a package that is not
there is skipped by name. The thresholds say when a part is likely to hold a run back, not what is the best there is.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from core.errors import HardwareError, PairmillError
from core.metrics import Jsonl
from core.runner import cores
from core.storage import Folder
from train.diagnose import COMM, PLACES, split_of

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from train.config import DoctorConfig

log = logging.getLogger("pairmill.doctor")

SECONDS = 0.4  # of each measurement
DISK_MB = 64
SLOW_DECODE = 400.0  # 256-px images a second and core; a core of 2020 does 1,000
SLOW_GPU_DECODE = 3000.0  # 256-px images a second; an A100's nvJPEG does about 7,000
SLOW_WAIT = 0.05  # share of a step
SLOW_DISK = 100.0  # MB/s; a hard disk's sequential rate
SLOW_SHARE = 0.5  # of a GPU's published matrix peak
OPEN_FILES = 1024
LOSS_TOLERANCE = {"gloo": 1e-9, "nccl": 1e-4}  # fp64 on CPUs, fp32 on GPUs
PIXEL_TOLERANCE = 0.5  # of 255, mean absolute difference between two decoders


@dataclass(frozen=True)
class Check:
    """One line: `state` is ok, slow, wrong or skipped; `do` is empty where there is nothing to do."""

    name: str
    state: str
    found: str
    do: str = ""


def run(config: DoctorConfig) -> dict[str, Any]:
    """All checks, {checks: [{name, state, found, do}], exit_code}; the exit code is not 0 where something is wrong."""
    checks: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("python", python),
        ("torch", torch_build),
        ("matrix products", matrix_products),
        ("cuda", cuda),
        ("nccl", nccl),
        ("nvml", nvml),
        ("dali", dali),
        ("pillow", pillow),
        ("jpeg decode", jpeg_decode),
        ("tokenizer", tokenizer),
        ("disk", lambda: disk(config.work)),
        ("open files", open_files),
        ("loss on ranks", loss_on_ranks),
        ("gpu decode", gpu_decode),
        ("100 steps", lambda: first_steps("ViT-B-32", 256, 100, "cuda")),
    )
    found = [_guarded(name, check) for name, check in checks]
    wrong = any(check.state == "wrong" for check in found)
    return {"checks": [asdict(check) for check in found], "exit_code": HardwareError.exit_code if wrong else 0}


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """A check that breaks is itself a finding."""
    try:
        return check()
    except PairmillError as error:
        return Check(name, "wrong", str(error), "see the message")
    except Exception as error:  # the boundary of one check: the others still run
        log.debug("%s failed", name, exc_info=True)
        last = str(error).strip().rsplit("\n", 1)[-1]
        return Check(name, "wrong", f"{type(error).__name__}: {last}", "reinstall what it names")


# ---------------------------------------------------------------- software


def python() -> Check:
    words = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", f"{words}, {cores()} cores for this process")


def torch_build() -> Check:
    import torch

    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    threads = torch.get_num_threads()
    found = f"{torch.__version__}, {kind}, {threads} threads"
    if threads > cores():
        return Check("torch", "slow", found, f"more threads than cores: set OMP_NUM_THREADS={cores()}")
    if threads < cores():
        return Check("torch", "ok", found, f"OMP_NUM_THREADS holds it to {threads} of {cores()} cores")
    return Check("torch", "ok", found)


def cuda() -> Check:
    import torch

    if not torch.cuda.is_available():
        hint = "" if torch.version.cuda is None else "this torch has CUDA; check the driver with nvidia-smi"
        return Check("cuda", "skipped", "no GPU", hint)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    return Check("cuda", "ok", f"{len(names)} x {names[0]}, {memory:.0f} GB each")


def nccl() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("nccl", "skipped", "no GPU")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Check("nccl", "ok", version)


def nvml() -> Check:
    """What `train` logs of the GPUs."""
    import torch

    from train import card

    if not torch.cuda.is_available():
        return Check("nvml", "skipped", "no GPU")
    try:
        read = card.reader(torch.device("cuda", 0))
    except (ImportError, RuntimeError) as error:
        return Check("nvml", "skipped", str(error), f"{card.INSTALL}, for utilisation and power in metrics.jsonl")
    return Check("nvml", "ok", card.words(card.over_ranks([read()]) or {}))


def pillow() -> Check:
    import PIL
    from PIL import features

    simd = ".post" in PIL.__version__  # how pillow-simd tells itself from Pillow
    turbo = features.check("libjpeg_turbo")
    found = f"{'pillow-simd' if simd else 'Pillow'} {PIL.__version__}, libjpeg{'-turbo' if turbo else ''}"
    if simd:
        return Check("pillow", "ok", found)
    return Check(
        "pillow",
        "ok",
        f"{found}, without SIMD",
        "pictures are reduced by cykooz.resizer (SIMD too; not on aarch64); `make simd` compiles pillow-simd in its place",
    )


def tokenizer() -> Check:
    from train.tokenizer import Tokenizer

    encoder = Tokenizer()
    texts = [f"a photo of {n} small red triangles on a dark background" for n in range(1000)]
    rate = _rate(lambda: encoder.encode(texts)) * len(texts)
    found = f"{encoder.backend}, {rate:,.0f} captions/s"
    if encoder.backend != "instant":
        return Check("tokenizer", "slow", found, "pip install instant-clip-tokenizer (Python 3.11 or 3.12 on x86-64)")
    return Check("tokenizer", "ok", found)


def open_files() -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        return Check("open files", "slow", f"at most {soft}", f"`ulimit -n {min(hard, 65536)}` before a large ingest")
    return Check("open files", "ok", f"at most {soft:,}")


# ---------------------------------------------------------------- speed


def matrix_products() -> Check:
    """bf16 against fp32 on this device, and a GPU against its published peak."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16, fp32 = (_matmul_flops(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    found = f"bf16 {bf16 / 1e12:,.2f} TFLOP/s, fp32 {fp32 / 1e12:,.2f}"
    if device.type == "cuda":
        return _against_peak(torch.cuda.get_device_name(0), bf16, found)
    if bf16 < fp32:
        return Check("matrix products", "slow", found, "bf16 does not pay on this CPU; training takes fp32 by itself")
    return Check("matrix products", "ok", found)


def _against_peak(name: str, flops: float, found: str) -> Check:
    from train.budget import GPUS

    kind = next((kind for kind in GPUS if _is_kind(name, kind.replace("-", " "))), None)
    kind = kind or next((kind for kind in GPUS if _is_kind(name, kind.split("-")[0])), None)
    if kind is None:
        return Check("matrix products", "ok", f"{found} ({name} is not in the table of peaks)")
    peak = GPUS[kind].peak_flops
    found += f", {flops / peak:.0%} of the peak of {kind}"
    if flops < SLOW_SHARE * peak:
        return Check("matrix products", "slow", found, "look at clocks and power limits: nvidia-smi -q -d PERFORMANCE")
    return Check("matrix products", "ok", found)


def _is_kind(name: str, kind: str) -> bool:
    return kind != "RTX" and re.search(rf"\b{kind}\b", name, re.IGNORECASE) is not None


def _matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    side = 8192 if device.type == "cuda" else 1024
    a = torch.ones(side, side, device=device, dtype=dtype)

    def once() -> None:
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2.0 * side**3 * _rate(once)


def jpeg_decode() -> Check:
    """Header, decode and resize of one 256-px picture to 224 px, on one thread, as the trainer does it."""
    import torch

    from core import images
    from train.decode_cpu import Picture, middle_view, render

    body = _photograph()

    def once() -> None:
        header = images.read_header(body)
        render(Picture(body, header, middle_view(header.width, header.height)), 224)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rate = _rate(once)
    finally:
        torch.set_num_threads(threads)
    found = f"{rate:,.0f} images/s and core, so about {rate * cores():,.0f} here (256 to 224 pixels)"
    if rate < SLOW_DECODE:
        return Check(
            "jpeg decode", "slow", found, "a busy or old CPU: store pictures near the training size (ingest --size)"
        )
    return Check("jpeg decode", "ok", found)


def gpu_decode() -> Check:
    """DALI's whole graph on the GPU: 256-px pictures to 224 px."""
    import torch

    from core import images
    from train.decode_cpu import Picture, middle_view
    from train.decode_dali import DaliDecoder, dali_installed

    if not torch.cuda.is_available():
        return Check("gpu decode", "skipped", "no GPU")
    if not dali_installed():
        return Check("gpu decode", "skipped", "DALI is not installed")
    body, batch = _photograph(), 256
    header = images.read_header(body)
    pictures = [Picture(body, header, middle_view(header.width, header.height))] * batch
    decoder = DaliDecoder(224, cores(), batch, torch.device("cuda"))

    def once() -> None:
        decoder.decode(pictures)
        torch.cuda.synchronize()

    try:
        rate = batch * _rate(once)
    finally:
        decoder.close()
    found = f"{rate:,.0f} images/s (256 to 224 pixels)"
    if rate < SLOW_GPU_DECODE:
        return Check(
            "gpu decode", "slow", found, "compare with --decode cpu; `pairmill diagnose` says which one the run needs"
        )
    return Check("gpu decode", "ok", found)


def first_steps(model: str, batch: int, steps: int, device: Literal["cpu", "cuda"]) -> Check:
    """A real run of some steps on made-up pictures: its rate, and where a step's time went."""
    import torch

    from train import card
    from train.config import TrainConfig
    from train.run import run as train

    if device == "cuda" and not torch.cuda.is_available():
        return Check(f"{steps} steps", "skipped", "no GPU")
    with tempfile.TemporaryDirectory(prefix="pairmill-doctor-") as work:
        _made_up_shards(Path(work) / "shards", max(512, 2 * batch))
        found = train(
            TrainConfig(work=work, model=model, batch_size=batch, steps=steps, device=device, ranks=1, val="none")
        )
        last = Jsonl(Path(found["run"]) / "metrics.jsonl").rows()[-1]
    wait = found["wait_share"] or 0.0
    words = f"{model}, batch {batch}: {found['pairs_per_s'] or 0:,.0f} pairs/s, {_split_words(last)}"
    if found["mfu"]:
        words += f"; {found['mfu']:.0%} MFU"
    if last["gpu"]:
        words += f"; {card.words(last['gpu'])}"
    if wait > SLOW_WAIT:
        return Check(f"{steps} steps", "slow", words, "`pairmill diagnose` on your own shards says what to change")
    return Check(f"{steps} steps", "ok", words)


def _split_words(row: dict[str, Any]) -> str:
    """Where a step's time goes in a row of metrics.jsonl."""
    split = split_of(row)
    said = [f"{split[place]['share']:.1%} {words}" for place, words in PLACES.items()]
    return f"of a step {', '.join(said)}" + (f" ({split['comm']['share']:.1%} {COMM})" if "comm" in split else "")


def _made_up_shards(folder: Path, count: int) -> None:
    import tarfile

    folder.mkdir()
    with tarfile.open(folder / "00000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for i in range(count):
            for extension, body in (("jpg", _photograph(i % 16)), ("txt", f"a soft shape, number {i}".encode())):
                member = tarfile.TarInfo(f"{i:06d}.{extension}")
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))


def disk(work: str) -> Check:
    """Write a file in the work folder and read it back past the page cache."""
    folder = Folder(work)
    if folder.local is None:
        return Check("disk", "skipped", f"{work} is not a local folder")
    home = next(p for p in (folder.local.absolute(), *folder.local.absolute().parents) if p.is_dir())
    with tempfile.NamedTemporaryFile(dir=home, prefix=".tmp-doctor-") as file:
        block = os.urandom(1 << 20)
        start = time.perf_counter()
        for _ in range(DISK_MB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = DISK_MB * 1.048576 / (time.perf_counter() - start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        with Path(file.name).open("rb", buffering=0) as again:
            while again.read(1 << 20):
                pass
        read = DISK_MB * 1.048576 / (time.perf_counter() - start)
    found = f"{home}: write {written:,.0f} MB/s, read {read:,.0f} MB/s"
    if min(written, read) < SLOW_DISK:
        return Check("disk", "slow", found, "put the shards on a local SSD, or expect the loader to wait for it")
    return Check("disk", "ok", found)


def _rate(once: Callable[[], object]) -> float:
    """Calls a second, after one call to warm up."""
    once()
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < SECONDS:
        once()
        calls += 1
    return calls / (time.perf_counter() - start)


# ---------------------------------------------------------------- exactness


def dali() -> Check:
    """DALI's pixels against libjpeg-turbo's: its CPU graph, and its GPU graph where there is a GPU."""
    import torch

    from train.decode_dali import INSTALL, DaliDecoder, dali_installed

    if not dali_installed():
        return Check("dali", "skipped", "not installed", f"{INSTALL}; pays on machines with a GPU")
    version = next(
        (d.version for d in importlib.metadata.distributions() if str(d.name).startswith("nvidia-dali-cuda")), "unknown"
    )
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    decoder = DaliDecoder(224, 1, 2, device)
    try:
        difference = _pixel_difference(decoder)
    finally:
        decoder.close()
    found = f"{version}, {'GPU' if gpu else 'CPU'} graph, pixels differ by {difference:.2f}/255 on the mean"
    if difference > PIXEL_TOLERANCE:
        return Check("dali", "wrong", found, "train with --decode cpu, and report the versions")
    return Check("dali", "ok", found)


def _pixel_difference(decoder: Any) -> float:
    from core import images
    from train.decode_cpu import CpuDecoder, Picture, middle_view

    body = _photograph()
    header = images.read_header(body)
    pictures = [Picture(body, header, middle_view(header.width, header.height))] * 2
    theirs, bad = decoder.decode(pictures)
    if bad:
        raise HardwareError(f"DALI cannot decode a plain JPEG: {bad}")
    reference = CpuDecoder(224, 1)
    ours, _ = reference.decode(pictures)
    reference.close()
    return float((theirs.cpu().float() - ours.float()).abs().mean())


@functools.cache
def _photograph(seed: int = 0) -> bytes:
    """A 256 x 256 JPEG with the roughness of a photograph (noise over soft shapes), the same every time."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(seed)
    soft = Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize(
        (256, 256), Image.Resampling.BICUBIC
    )
    rough = np.asarray(soft, dtype=np.int16) + draw.normal(0, 12, (256, 256, 3)).astype(np.int16)
    out = io.BytesIO()
    Image.fromarray(rough.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def loss_on_ranks() -> Check:
    """The sharded loss and its gradients on all GPUs (2 gloo ranks without) against one process with the whole batch."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 1:
        return Check("loss on ranks", "skipped", "one GPU needs no collective")
    backend, size = ("nccl", gpus) if gpus else ("gloo", 2)
    error = _spawned_loss_error(backend, size)
    found = f"{size} {backend} ranks agree with one process to {error:.1e}"
    if not error <= LOSS_TOLERANCE[backend]:
        return Check(
            "loss on ranks", "wrong", found, "do not train on several ranks; report the versions of torch and NCCL"
        )
    return Check("loss on ranks", "ok", found)


def _spawned_loss_error(backend: str, size: int) -> float:
    """Largest relative error of loss and gradients over the ranks."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix="pairmill-doctor-") as folder:
        mp.spawn(_one_rank, args=(size, backend, folder), nprocs=size)  # type: ignore[no-untyped-call]
        return max(float((Path(folder) / f"error{rank}").read_text()) for rank in range(size))


def _one_rank(rank: int, size: int, backend: str, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore", FutureWarning)  # torch renames its collectives between versions
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        error = _loss_error(rank, size, torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    (Path(folder) / f"error{rank}").write_text(repr(error))


def _loss_error(rank: int, size: int, device: torch.device) -> float:
    """This rank's loss, embedding gradients and scale gradient against the full matrix's, relative."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import normalize

    from train.loss import clip_loss, full_loss

    share, width = 24, 32
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    draw = torch.Generator().manual_seed(0)
    whole = [normalize(torch.randn(share * size, width, generator=draw, dtype=torch.float64), dim=1) for _ in range(2)]
    scale = torch.tensor(2.6, dtype=torch.float64)
    reference = [t.clone().requires_grad_() for t in (*whole, scale)]
    expected = full_loss(*reference)
    expected.backward()  # type: ignore[no-untyped-call]

    rows = slice(rank * share, (rank + 1) * share)
    own = [t.to(device, dtype).clone().requires_grad_() for t in (whole[0][rows], whole[1][rows], scale)]
    loss = clip_loss(*own)
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [t.grad for t in own]
    assert all(g is not None for g in grads)
    scale_grad: Any = grads[2] / size  # type: ignore[operator]
    dist.all_reduce(scale_grad)
    pairs: list[tuple[Any, Any]] = [(loss.detach(), expected.detach()), (scale_grad, reference[2].grad)]
    pairs += [(grads[i] / size, reference[i].grad[rows]) for i in (0, 1)]  # type: ignore[operator,index]
    return max(_relative(a, b) for a, b in pairs)


def _relative(found: torch.Tensor, expected: Any) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())


def render(summary: dict[str, Any]) -> RenderableType:
    """The checks as lines for a terminal."""
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "slow": "yellow", "wrong": "bold red", "skipped": "dim"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in summary["checks"]:
        words = Text(check["found"])
        if check["do"]:
            words.append(f"\n{check['do']}", style="dim")
        table.add_row(Text(check["state"], style=colours[check["state"]]), Text(check["name"], style="bold"), words)
    return table
