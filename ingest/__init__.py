"""From a list of image URLs with alt text to fetched, checked and reduced pairs.

Way in: `fetch` takes a URL list, `adopt` takes shards that another tool made. Way out: `ingest/parts/*.parquet`, one row
an input row with a closed outcome, beside the staged images in `ingest/parts/*.tar`.
"""
