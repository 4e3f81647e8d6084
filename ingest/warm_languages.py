"""The language model in the process that workers are forked from: unpacking it costs 0.5 s and its memory is shared so."""

from ingest import captions

captions.languages(["a"])
