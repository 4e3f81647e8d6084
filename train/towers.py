"""The two towers of CLIP (Radford et al. 2021), with open_clip's parameter names and shapes.

Shape letters: B batch, C channels, H W pixels, L text positions, P patches of an image, R rows (all positions of all
samples, one below the other), N samples of a segment, D width of a tower, E joint width.

Everything between the embedding and the pooling works on rows, so a batch of captions of many lengths needs no
common padding: it is cut into segments (N samples of the same padded length each), and only attention looks at the
cut. The last block is computed at the pooled position alone, because nothing else of it is ever read: exact, and a
sixth of a six-layer tower saved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from core.errors import ConfigError
from train.attention import Segment, attend, attend_one
from train.eightbit import KINDS
from train.linear import linear
from train.models import MLP_RATIO, ModelConfig
from train.resnet import ResNetTower

# Channel statistics that every public CLIP was trained with (RGB, pixels scaled to [0, 1]).
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)

INITIAL_LOG_SCALE = math.log(1 / 0.07)
INITIAL_BIAS = -10.0  # SigLIP's
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
              **dict.fromkeys(KINDS, torch.bfloat16)}  # fmt: skip

# Rows of padding a text segment may hold before a new one is opened; each segment costs some 20 small calls a layer.
SEGMENT_WASTE = 256
# Captions join a segment by the group, and its length is rounded up: oneDNN compiles and keeps code for every shape it
# meets, and with any numbers a small model's process grew to 2.0 GB in 80 steps; with these it stays at 1.0 GB.
SEGMENT_GROUP, SEGMENT_STEP = 16, 4


def trim(tokens_BL: Tensor) -> Tensor:
    """Tokens cut behind the last end marker of the batch.

    Exact: the mask is causal and pooling reads the end marker (the highest id), so later positions are never read.
    """
    longest = int(tokens_BL.argmax(dim=1).max()) + 1 if tokens_BL.numel() else 1
    return tokens_BL[:, :longest]


def _norm(x: Tensor, ln: nn.LayerNorm) -> Tensor:
    # CPUs take fp32 gains with bf16 rows (statistics are fp32 either way); the CUDA kernel wants one type.
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and ln.weight.dtype == torch.float32:
        return F.layer_norm(x, ln.normalized_shape, ln.weight, ln.bias, ln.eps)
    return F.layer_norm(x, ln.normalized_shape, ln.weight.to(x.dtype), ln.bias.to(x.dtype), ln.eps)


class Attention(nn.Module):
    """Weights of multi-head self-attention under the names of `nn.MultiheadAttention`."""

    eight_bits = ""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x_RD: Tensor, segments: list[Segment], read_N: Tensor | None = None) -> Tensor:
        """Attention of all rows, or of the rows `read_N` (one a sample) only."""
        if read_N is None:
            qkv = linear(x_RD, self.in_proj_weight, self.in_proj_bias, self.eight_bits)
            out = attend(qkv, self.heads, segments, self.causal)
        else:
            width = x_RD.shape[1]
            q = linear(x_RD[read_N], self.in_proj_weight[:width], self.in_proj_bias[:width], self.eight_bits)
            kv = linear(x_RD, self.in_proj_weight[width:], self.in_proj_bias[width:], self.eight_bits)
            out = attend_one(q, kv, self.heads, segments, read_N if self.causal else None)
        return linear(out, self.out_proj.weight, self.out_proj.bias, self.eight_bits)


class Mlp(nn.Module):
    eight_bits = ""

    def __init__(self, width: int, quick_gelu: bool) -> None:
        super().__init__()
        self.quick_gelu = quick_gelu
        self.c_fc = nn.Linear(width, MLP_RATIO * width)
        self.c_proj = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = linear(x, self.c_fc.weight, self.c_fc.bias, self.eight_bits)
        h = h * torch.sigmoid(1.702 * h) if self.quick_gelu else F.gelu(h)
        return linear(h, self.c_proj.weight, self.c_proj.bias, self.eight_bits)


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, width: int, heads: int, causal: bool, quick_gelu: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, quick_gelu)

    def forward(self, x_RD: Tensor, segments: list[Segment], read_N: Tensor | None = None) -> Tensor:
        """All rows, or with `read_N` those rows only (shape (N, D))."""
        mixed = self.attn(_norm(x_RD, self.ln_1), segments, read_N)
        x = (x_RD if read_N is None else x_RD[read_N]) + mixed
        return x + self.mlp(_norm(x, self.ln_2))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, causal: bool, quick_gelu: bool) -> None:
        super().__init__()
        self.width = width
        self.checkpoint_blocks = False
        self.resblocks = nn.ModuleList(Block(width, heads, causal, quick_gelu) for _ in range(layers))

    def forward(self, x_RD: Tensor, segments: list[Segment], read_N: Tensor) -> Tensor:
        """Rows through all blocks; returns the rows `read_N` of the last one."""
        last = len(self.resblocks) - 1
        for i, block in enumerate(self.resblocks):
            read = read_N if i == last else None
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x_RD = checkpoint(block, x_RD, segments, read, use_reentrant=False)
            else:
                x_RD = block(x_RD, segments, read)
        return x_RD

    def init_gpt(self) -> None:
        """CLIP's initialisation of the text blocks (Radford et al. 2021, section 2.4, and the released code)."""
        depth = (2 * len(self.resblocks)) ** -0.5
        for block in self.resblocks:
            assert isinstance(block, Block)
            nn.init.normal_(block.attn.in_proj_weight, std=self.width**-0.5)
            nn.init.normal_(block.attn.out_proj.weight, std=self.width**-0.5 * depth)
            nn.init.normal_(block.mlp.c_fc.weight, std=(2 * self.width) ** -0.5)
            nn.init.normal_(block.mlp.c_proj.weight, std=self.width**-0.5 * depth)


class VisionTower(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        assert isinstance(cfg.vision_layers, int)
        width, scale = cfg.vision_width, cfg.vision_width**-0.5
        self.patch = cfg.patch
        self.patch_dropout = cfg.patch_dropout
        self.conv1 = nn.Conv2d(3, width, cfg.patch, cfg.patch, bias=False)
        self.class_embedding = nn.Parameter(scale * torch.randn(width))
        self.positional_embedding = nn.Parameter(scale * torch.randn(cfg.patches + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = Transformer(width, cfg.vision_layers, cfg.vision_heads, False, cfg.quick_gelu)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(scale * torch.randn(width, cfg.embed_dim))

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalised pixels in the compute type -> features_BE, in the parameters' type, not normalised."""
        x_BPD, samples = self._embed(pixels_BCHW), pixels_BCHW.shape[0]
        length = x_BPD.shape[1]
        rows = _norm(x_BPD.reshape(samples * length, -1), self.ln_pre)
        read_N = torch.arange(0, samples * length, length, device=rows.device)
        pooled = self.transformer(rows, [Segment(samples, length)], read_N)
        return _norm(pooled.to(self.proj.dtype), self.ln_post) @ self.proj

    def _embed(self, pixels_BCHW: Tensor) -> Tensor:
        """(B, 1 + kept patches, D): class token and patches with their positions."""
        b, c, h, w = pixels_BCHW.shape
        p = self.patch
        patches = pixels_BCHW.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * p)
        pos_1PD = self.positional_embedding[1:].unsqueeze(0)
        if self.training and self.patch_dropout > 0:
            keep_Bk = self._kept(b, patches.shape[1], patches.device)
            patches = patches.gather(1, keep_Bk.unsqueeze(2).expand(-1, -1, patches.shape[2]))
            pos_1PD = pos_1PD[0][keep_Bk]
        x_RD = linear(patches.flatten(0, 1), self.conv1.weight.flatten(1))
        x_BPD = x_RD.view(b, -1, x_RD.shape[1]) + pos_1PD.to(patches.dtype)
        first_D = self.class_embedding + self.positional_embedding[0]
        return torch.cat([first_D.to(x_BPD.dtype).expand(b, 1, -1), x_BPD], dim=1)

    def _kept(self, samples: int, patches: int, device: torch.device) -> Tensor:
        keep = max(1, int(patches * (1.0 - self.patch_dropout)))
        return torch.rand(samples, patches, device=device).topk(keep, dim=1).indices


def text_segments(length_B: Tensor, widest: int, waste: int = SEGMENT_WASTE) -> tuple[Tensor, list[Segment]]:
    """Cut a batch of captions into segments of like length.

    Returns the order (longest first) that puts the samples of a segment side by side, and the segments, none longer than
    `widest`. Captions join a segment in groups, until its padding has grown to `waste` rows.
    """
    order_B = length_B.argsort(descending=True, stable=True)
    lengths = length_B[order_B].tolist()
    segments: list[Segment] = []
    count = length = padding = 0
    for start in range(0, len(lengths), SEGMENT_GROUP):
        group = lengths[start : start + SEGMENT_GROUP]
        if count and padding + length * len(group) - sum(group) > waste:
            segments.append(Segment(count, length))
            count = padding = 0
        if not count:
            length = min(widest, -(-group[0] // SEGMENT_STEP) * SEGMENT_STEP)
        count, padding = count + len(group), padding + length * len(group) - sum(group)
    if count:
        segments.append(Segment(count, length))
    return order_B, segments


class CLIP(nn.Module):
    """Image tower, text tower and log scale.

    `precision` is the type of the matrix products ("fp32", "bf16"; "fp64" for tests, with parameters in fp64). The
    parameters keep their own type: weights are rounded once a forward pass, so no autocast is needed around it.
    `logit_bias` adds SigLIP's second scalar.
    """

    logit_bias: Tensor | None

    def __init__(self, cfg: ModelConfig, precision: str = "fp32", logit_bias: bool = False) -> None:
        super().__init__()
        self.cfg = cfg
        self.visual: VisionTower | ResNetTower = ResNetTower(cfg) if cfg.is_resnet else VisionTower(cfg)
        self.transformer = Transformer(cfg.text_width, cfg.text_layers, cfg.text_heads, True, cfg.quick_gelu)
        self.token_embedding = nn.Embedding(cfg.vocab, cfg.text_width)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(cfg.context, cfg.text_width))
        self.ln_final = nn.LayerNorm(cfg.text_width)
        self.text_projection = nn.Parameter(cfg.text_width**-0.5 * torch.randn(cfg.text_width, cfg.embed_dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0) if logit_bias else INITIAL_LOG_SCALE))
        self.logit_bias = nn.Parameter(torch.tensor(INITIAL_BIAS)) if logit_bias else None
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        self.transformer.init_gpt()
        self.set_precision(precision)

    def set_precision(self, precision: str) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}; found {precision!r}.")
        self.compute_dtype = PRECISIONS[precision]
        for module in self.modules():
            if isinstance(module, Attention | Mlp):
                module.eight_bits = precision if precision in KINDS else ""

    def set_checkpointing(self, on: bool) -> None:
        """Recompute every block's activations in the backward pass: about a third more work, much less memory."""
        image = self.visual.transformer if isinstance(self.visual, VisionTower) else self.visual
        image.checkpoint_blocks = self.transformer.checkpoint_blocks = on

    def loss_scalars(self) -> list[Tensor]:
        """The parameters that the loss itself reads: log scale and, for SigLIP, bias."""
        return [self.logit_scale] if self.logit_bias is None else [self.logit_scale, self.logit_bias]

    def encode_image(self, pixels_BCHW: Tensor, normalize: bool = True) -> Tensor:
        """uint8 pixels, or floats already normalised -> embeddings_BE in the parameters' type."""
        features = self.visual(self._pixels(pixels_BCHW))
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, tokens_BL: Tensor, normalize: bool = True) -> Tensor:
        """Token ids (at most `context` wide, may be trimmed) -> embeddings_BE in the parameters' type."""
        end_B = tokens_BL.argmax(dim=1)
        if tokens_BL.device.type == "cpu":
            order_B, segments = text_segments(end_B + 1, tokens_BL.shape[1])
        else:  # lengths live on the device: reading them would stall it, so callers trim before the copy
            order_B, segments = torch.arange(len(end_B), device=end_B.device), [Segment(*tokens_BL.shape)]
        rows, read_N = self._text_rows(tokens_BL[order_B], end_B[order_B], segments)
        pooled = self.transformer(rows, segments, read_N)
        features = _norm(pooled.to(self.text_projection.dtype), self.ln_final) @ self.text_projection
        features = features[order_B.argsort()]
        return F.normalize(features, dim=-1) if normalize else features

    def forward(self, pixels_BCHW: Tensor, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Both embeddings, normalised: (img_BE, txt_BE)."""
        return self.encode_image(pixels_BCHW), self.encode_text(tokens_BL)

    def _pixels(self, pixels_BCHW: Tensor) -> Tensor:
        if pixels_BCHW.dtype != torch.uint8:
            return pixels_BCHW.to(self.compute_dtype)
        wide = torch.promote_types(self.compute_dtype, torch.float32)
        mean = torch.tensor(IMAGE_MEAN, dtype=wide, device=pixels_BCHW.device).view(3, 1, 1)
        std = torch.tensor(IMAGE_STD, dtype=wide, device=pixels_BCHW.device).view(3, 1, 1)
        return torch.addcmul(-mean / std, pixels_BCHW.to(wide), 1 / (255 * std)).to(self.compute_dtype)

    def _text_rows(self, tokens_BL: Tensor, end_B: Tensor, segments: list[Segment]) -> tuple[Tensor, Tensor]:
        """Embedded rows of all segments and, for each sample, the row of its end marker."""
        ids: list[Tensor] = []
        places: list[Tensor] = []
        read: list[Tensor] = []
        sample = start = 0
        for n, length in segments:
            ids.append(tokens_BL[sample : sample + n, :length].flatten())
            places.append(torch.arange(length, device=end_B.device).repeat(n))
            first_N = torch.arange(start, start + n * length, length, device=end_B.device)
            read.append(first_N + end_B[sample : sample + n])
            sample, start = sample + n, start + n * length
        # one look-up for all segments, because the gradient of a look-up is as large as the whole table
        x_RD = self.token_embedding(torch.cat(ids)) + F.embedding(torch.cat(places), self.positional_embedding)
        return x_RD.to(self.compute_dtype), torch.cat(read)


def unwrap(model: nn.Module) -> CLIP:
    """The CLIP inside DistributedDataParallel, or the model itself."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, CLIP)
    return inner
