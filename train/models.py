"""Named CLIP shapes, and what they cost.

Shapes of the published models follow open_clip's configs of the same names. The counting functions are pure
arithmetic (no torch), so `plan` can use them before anything heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError, nearest

MLP_RATIO = 4
RESNET_EXPANSION = 4  # channels behind a bottleneck over those inside it
RESNET_STRIDE = 32  # pixels a side that one position of the last grid sees the middle of


@dataclass(frozen=True)
class ModelConfig:
    """Shape of both towers. Widths must divide by heads, `image_size` by `patch` in a ViT and by 2 in a ResNet."""

    embed_dim: int
    """Width of the joint space."""
    image_size: int
    """Side of the square input, pixels."""
    patch: int
    """Side of a patch, pixels; a ResNet's total stride, which is 32."""
    vision_width: int
    """Width of the image transformer; channels behind a ResNet's stem."""
    vision_layers: int | tuple[int, int, int, int]
    """Blocks of a ViT; blocks in each of the four stages of a ResNet."""
    vision_heads: int
    """Attention heads; of a ResNet those of its pooling."""
    text_width: int
    text_layers: int
    text_heads: int
    context: int = 77
    """Longest caption in tokens, start and end markers included."""
    vocab: int = 49408
    quick_gelu: bool = False
    """x * sigmoid(1.702 x), as OpenAI's own checkpoints need; otherwise the exact GELU."""
    patch_dropout: float = 0.0
    """Share of patches dropped in training (FLIP); 0 keeps all. Finish with a short phase at 0."""

    def __post_init__(self) -> None:
        if isinstance(self.vision_layers, list):  # as JSON gives it back
            object.__setattr__(self, "vision_layers", tuple(self.vision_layers))
        if self.is_resnet and (self.patch != RESNET_STRIDE or self.patch_dropout):
            raise ConfigError(
                f"a ResNet has patch {RESNET_STRIDE} and drops no patches; found patch {self.patch} and patch_dropout "
                f"{self.patch_dropout}; set the one to {RESNET_STRIDE} and the other to 0."
            )
        step = 2 if self.is_resnet else self.patch  # a ResNet's pools leave out what is over at an edge
        if self.image_size % step or self.image_size < self.patch:
            raise ConfigError(
                f"image_size {self.image_size} does not fit patch {self.patch}; choose a multiple of {step} from {self.patch} up."
            )
        for tower, width, heads in (
            ("vision", self.pooled_width, self.vision_heads),
            ("text", self.text_width, self.text_heads),
        ):
            if width % heads:
                raise ConfigError(f"{tower}_width {width} is no multiple of {tower}_heads {heads}; choose one that is.")
        if not 0.0 <= self.patch_dropout < 1.0:
            raise ConfigError(f"patch_dropout must lie in [0, 1), found {self.patch_dropout}.")

    @property
    def is_resnet(self) -> bool:
        """Whether the image tower is a ResNet; otherwise it is a ViT."""
        return isinstance(self.vision_layers, tuple)

    @property
    def pooled_width(self) -> int:
        """Width of what the image tower pools: a ResNet's last stage has 8 times its first stage's channels."""
        return self.vision_width * 8 * RESNET_EXPANSION if self.is_resnet else self.vision_width

    @property
    def patches(self) -> int:
        """Patches of one image, or positions of a ResNet's last grid; the class token not counted."""
        return (self.image_size // self.patch) ** 2


def _vit_b(patch: int) -> ModelConfig:
    return ModelConfig(512, 224, patch, 768, 12, 12, 512, 12, 8)


def _vit_l(image_size: int) -> ModelConfig:
    return ModelConfig(768, image_size, 14, 1024, 24, 16, 768, 12, 12)


def _resnet(
    layers: tuple[int, int, int, int], embed_dim: int, image_size: int, width: int, text_width: int
) -> ModelConfig:
    return ModelConfig(
        embed_dim, image_size, RESNET_STRIDE, width, layers, width // 2, text_width, 12, text_width // 64
    )


MODELS: dict[str, ModelConfig] = {
    "test-32": ModelConfig(32, 32, 8, 32, 2, 2, 32, 2, 2),
    "tiny-48": ModelConfig(128, 48, 8, 128, 4, 4, 128, 2, 4),
    "small-112": ModelConfig(256, 112, 16, 256, 6, 4, 256, 4, 4),
    "small-rn-112": ModelConfig(256, 112, RESNET_STRIDE, 32, (1, 1, 1, 1), 16, 256, 4, 4),
    "ViT-B-32": _vit_b(32),
    "ViT-B-16": _vit_b(16),
    "ViT-L-14": _vit_l(224),
    "ViT-L-14-336": _vit_l(336),
    "ViT-H-14": ModelConfig(1024, 224, 14, 1280, 32, 16, 1024, 24, 16),
    "RN50": _resnet((3, 4, 6, 3), 1024, 224, 64, 512),
    "RN101": _resnet((3, 4, 23, 3), 512, 224, 64, 512),
    "RN50x4": _resnet((4, 6, 10, 6), 640, 288, 80, 640),
    "RN50x16": _resnet((6, 8, 18, 8), 768, 384, 96, 768),
    "RN50x64": _resnet((3, 15, 36, 10), 1024, 448, 128, 1024),
}


def model_config(name: str) -> ModelConfig:
    """The shape called `name`; ConfigError naming the nearest known ones otherwise."""
    if name not in MODELS:
        raise ConfigError(f"No model is called {name!r}; {nearest(name, MODELS)}")
    return MODELS[name]


def _block_params(width: int) -> int:
    matrices = (4 + 2 * MLP_RATIO) * width * width
    biases = (3 + 1 + MLP_RATIO + 1) * width
    return matrices + biases + 4 * width


def resnet_convolutions(cfg: ModelConfig) -> list[tuple[int, int, int, int]]:
    """Every convolution of a ResNet as (inputs, outputs, kernel side, side of the grid it writes)."""
    assert isinstance(cfg.vision_layers, tuple)
    width, side = cfg.vision_width, cfg.image_size // 2
    found = [(3, width // 2, 3, side), (width // 2, width // 2, 3, side), (width // 2, width, 3, side)]
    inputs, side = width, side // 2
    for i, blocks in enumerate(cfg.vision_layers):
        planes, outputs = width * 2**i, width * 2**i * RESNET_EXPANSION
        for j in range(blocks):
            after = side // 2 if i and not j else side
            found += [(inputs, planes, 1, side), (planes, planes, 3, side), (planes, outputs, 1, after)]
            if not j:
                found.append((inputs, outputs, 1, after))
            inputs, side = outputs, after
    return found


def _resnet_params(cfg: ModelConfig) -> int:
    width, pooled = cfg.pooled_width, (cfg.patches + 1) * cfg.pooled_width
    layers = sum(inputs * outputs * kernel**2 + 2 * outputs for inputs, outputs, kernel, _ in resnet_convolutions(cfg))
    return layers + pooled + 3 * (width * width + width) + width * cfg.embed_dim + cfg.embed_dim


def _resnet_flops(cfg: ModelConfig) -> float:
    width = cfg.pooled_width
    layers = sum(inputs * outputs * kernel**2 * side**2 for inputs, outputs, kernel, side in resnet_convolutions(cfg))
    pool = 2 * (cfg.patches + 1) * width**2 + width**2 + 2 * (cfg.patches + 1) * width + width * cfg.embed_dim
    return 2.0 * (layers + pool)


def vision_params(cfg: ModelConfig) -> int:
    """Parameters of the image tower, projection included."""
    if not isinstance(cfg.vision_layers, int):
        return _resnet_params(cfg)
    width = cfg.vision_width
    embed = 3 * cfg.patch**2 * width + width + (cfg.patches + 1) * width
    return embed + 4 * width + cfg.vision_layers * _block_params(width) + width * cfg.embed_dim


def text_params(cfg: ModelConfig) -> int:
    """Parameters of the text tower, token table and projection included."""
    width = cfg.text_width
    embed = (cfg.vocab + cfg.context) * width
    return embed + 2 * width + cfg.text_layers * _block_params(width) + width * cfg.embed_dim


def param_count(cfg: ModelConfig) -> int:
    """All parameters, the log scale included."""
    return vision_params(cfg) + text_params(cfg) + 1


def _tower_flops(width: int, layers: int, tokens: float) -> float:
    per_token = (4 + 2 * MLP_RATIO) * width * width + 2 * tokens * width
    return 2.0 * layers * tokens * per_token


def forward_flops(cfg: ModelConfig, text_len: float = 77.0) -> float:
    """Floating point operations of one pair's forward pass, as papers count them (a multiply-add is two).

    `text_len` is the mean number of text positions computed. Masked attention counts in full, and the last block
    counts in full although `towers` computes it at the pooled position only: figures compare with other trainers'.
    """
    if isinstance(cfg.vision_layers, int):
        kept = max(1, int(cfg.patches * (1.0 - cfg.patch_dropout)))
        image = _tower_flops(cfg.vision_width, cfg.vision_layers, kept + 1)
        image += 2.0 * kept * 3 * cfg.patch**2 * cfg.vision_width + 2.0 * cfg.vision_width * cfg.embed_dim
    else:
        image = _resnet_flops(cfg)
    text = _tower_flops(cfg.text_width, cfg.text_layers, text_len) + 2.0 * cfg.text_width * cfg.embed_dim
    return image + text


def flops_per_pair(cfg: ModelConfig, text_len: float = 77.0) -> float:
    """Operations of one pair's training step: the backward pass costs two forwards (Kaplan et al. 2020, 6N a token)."""
    return 3.0 * forward_flops(cfg, text_len)
