"""Named CLIP shapes, and what they cost.

Shapes of the published models follow open_clip's configs of the same names. The counting functions are pure
arithmetic (no torch), so `plan` can use them before anything heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError, nearest

MLP_RATIO = 4


@dataclass(frozen=True)
class ModelConfig:
    """Shape of both towers. Widths must divide by heads, `image_size` by `patch`."""

    embed_dim: int
    """Width of the joint space."""
    image_size: int
    """Side of the square input, pixels."""
    patch: int
    """Side of a patch, pixels."""
    vision_width: int
    vision_layers: int
    vision_heads: int
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
        if self.image_size % self.patch:
            raise ConfigError(f"image_size {self.image_size} is no multiple of patch {self.patch}; choose one that is.")
        for tower, width, heads in (
            ("vision", self.vision_width, self.vision_heads),
            ("text", self.text_width, self.text_heads),
        ):
            if width % heads:
                raise ConfigError(f"{tower}_width {width} is no multiple of {tower}_heads {heads}; choose one that is.")
        if not 0.0 <= self.patch_dropout < 1.0:
            raise ConfigError(f"patch_dropout must lie in [0, 1), found {self.patch_dropout}.")

    @property
    def patches(self) -> int:
        """Patches of one image, the class token not counted."""
        return (self.image_size // self.patch) ** 2


def _vit_b(patch: int) -> ModelConfig:
    return ModelConfig(512, 224, patch, 768, 12, 12, 512, 12, 8)


def _vit_l(image_size: int) -> ModelConfig:
    return ModelConfig(768, image_size, 14, 1024, 24, 16, 768, 12, 12)


MODELS: dict[str, ModelConfig] = {
    "test-32": ModelConfig(32, 32, 8, 32, 2, 2, 32, 2, 2),
    "tiny-48": ModelConfig(128, 48, 8, 128, 4, 4, 128, 2, 4),
    "small-112": ModelConfig(256, 112, 16, 256, 6, 4, 256, 4, 4),
    "ViT-B-32": _vit_b(32),
    "ViT-B-16": _vit_b(16),
    "ViT-L-14": _vit_l(224),
    "ViT-L-14-336": _vit_l(336),
    "ViT-H-14": ModelConfig(1024, 224, 14, 1280, 32, 16, 1024, 24, 16),
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


def vision_params(cfg: ModelConfig) -> int:
    """Parameters of the image tower, projection included."""
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
    kept = max(1, int(cfg.patches * (1.0 - cfg.patch_dropout)))
    image = _tower_flops(cfg.vision_width, cfg.vision_layers, kept + 1)
    image += 2.0 * kept * 3 * cfg.patch**2 * cfg.vision_width + 2.0 * cfg.vision_width * cfg.embed_dim
    text = _tower_flops(cfg.text_width, cfg.text_layers, text_len) + 2.0 * cfg.text_width * cfg.embed_dim
    return image + text


def flops_per_pair(cfg: ModelConfig, text_len: float = 77.0) -> float:
    """Operations of one pair's training step: the backward pass costs two forwards (Kaplan et al. 2020, 6N a token)."""
    return 3.0 * forward_flops(cfg, text_len)
