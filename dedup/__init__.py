"""Near-duplicate pairs out, with proof: caption MinHash, image hashes, DuckDB bands, filters in SQL, and a stated policy.

Way in: `WORK/ingest/parts/*.parquet`, or a bare table of captions.
Way out: `WORK/dedup/decisions.parquet`, one row a pair: kept, or why not, who stands for it, and on what evidence.
`keep.run(DedupConfig)` is the stage; `tokens`, `minhash`, `bands`, `match`, `clusters` and `policy` are its kernels.
"""
