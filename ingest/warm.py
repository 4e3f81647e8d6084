"""What every worker needs, imported once for all of them: workers are forked from the process that has imported this."""

import gc
import importlib
import os

# before numpy: every core has a worker already, more threads inside BLAS would only fight over them
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
for name in ("core.images", "core.imagehash", "ingest.fetch", "ingest.http", "PIL.Image", "ftfy", "pyarrow.parquet",
             "simplejpeg", "uvloop", "xxhash"):  # fmt: skip
    importlib.import_module(name)
# unpacks the language model: 0.5 s, and its memory is shared
importlib.import_module("ingest.captions").languages(["a"])
gc.freeze()  # what is imported stays; looking through it for garbage over and over is 1 % of a worker's time
