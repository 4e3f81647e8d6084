"""Near-duplicate pairs out, with proof: caption MinHash, image hashes, DuckDB bands, filters in SQL, and a stated policy.

Way in: `WORK/ingest/parts/*.parquet`, or a bare table of captions.
Way out: the view `decisions`, one row a pair: kept, or why not, who stands for it, and on what evidence. Its files are
`WORK/dedup/decisions.parquet`, which leaves out pairs that stay and are like no other, and `WORK/dedup/pairs.parquet`.
`keep.run(DedupConfig)` is the stage; `tokens`, `minhash`, `bands`, `match`, `clusters` and `policy` are its kernels.
"""
