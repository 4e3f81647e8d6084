"""Run by the Python of the side environment that holds open_clip; writes what its models make of given inputs.

    python open_clip_peer.py MODEL INPUTS.npz OUT.npz WEIGHTS.pt [MODEL …]

MODEL is a name of open_clip's, or `local-dir:FOLDER`. A named one gets random weights, which go to WEIGHTS.pt
(empty for the other kind). Several are done by one process, because importing open_clip takes longer than they do.
INPUTS holds pixels (B, 3, S, S) float32, already normalised, and tokens (B, 77); OUT gets image and text, not normalised.
"""

from __future__ import annotations

import sys

import numpy as np
import open_clip
import torch


def main(name: str, inputs: str, out: str, weights: str) -> None:
    torch.manual_seed(0)
    model = open_clip.create_model(name).eval()
    if weights:
        for module in model.modules():  # running statistics and gains that are not all 0 and 1
            if isinstance(module, torch.nn.BatchNorm2d):
                for tensor in (module.weight.data, module.running_var):
                    tensor.uniform_(0.5, 1.5)
                for tensor in (module.bias.data, module.running_mean):
                    tensor.normal_(0, 0.1)
        torch.save(model.state_dict(), weights)
    given = np.load(inputs)
    with torch.no_grad():
        image = model.encode_image(torch.from_numpy(given["pixels"]))
        text = model.encode_text(torch.from_numpy(given["tokens"]))
    np.savez(out, image=image.numpy(), text=text.numpy())


if __name__ == "__main__":
    for at in range(1, len(sys.argv), 4):
        main(*sys.argv[at : at + 4])
