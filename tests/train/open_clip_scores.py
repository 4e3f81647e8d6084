"""Run by the Python of the side environment that holds open_clip; writes how well pictures and captions go together there.

    python open_clip_scores.py MODEL WEIGHTS.pt PAIRS.json SCORES.json

MODEL is a name of open_clip's and gets random weights, which go to WEIGHTS.pt. PAIRS holds [picture's file, caption] each;
decoding, preparing and tokenising are open_clip's own, and SCORES gets the cosines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import open_clip
import torch
from PIL import Image


def main(name: str, weights: str, pairs: str, scores: str) -> None:
    torch.manual_seed(0)
    model, _, prepare = open_clip.create_model_and_transforms(name)
    torch.save(model.eval().state_dict(), weights)
    files, captions = zip(*json.loads(Path(pairs).read_text()), strict=True)
    with torch.no_grad():
        pixels = torch.stack([prepare(Image.open(file)) for file in files])
        image = model.encode_image(pixels, normalize=True)
        text = model.encode_text(open_clip.get_tokenizer(name)(list(captions)), normalize=True)
    Path(scores).write_text(json.dumps((image * text).sum(dim=1).tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
