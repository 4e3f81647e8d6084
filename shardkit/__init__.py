"""Kept pairs become tar shards, and shards become batches.

Way in: the views `pairs` and `decisions`. Way out: `shards/` (and `holdout/`): tars that webdataset and DALI
read unchanged, their indexes, `samples.parquet` and `shards.json`. `pack` and `verify` are the stages; `reader` and `lanes`
give a trainer the same batches on any number of ranks.
"""
