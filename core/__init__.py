"""What every stage shares: contracts, settings, storage, units, the catalogue, images, metrics and errors.

Way in: nothing here imports a stage. Way out: every stage builds on these modules and meets the others only in files.
`errors`, `config` and `schema` are cheap to import; `storage`, `catalog`, `images` load their libraries on first use.
"""
