"""Training: shards in, a CLIP checkpoint out.

In:  WORK/shards (read through shardkit.reader), a named model, one training config.
Out: WORK/runs/NAME with metrics.jsonl, eval.jsonl, checkpoints and the config as run.
Way: data -> decode -> towers -> one symmetric loss over all ranks -> AdamW; `loop.run` is the stage.
"""
