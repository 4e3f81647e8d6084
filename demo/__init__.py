"""A small world of rendered pictures with captions, and a loopback server that serves it with planted faults.

Way in: `demo.world.make_world(folder)` renders it; `with DemoServer(world.folder) as server` serves it.
Way out: `demo.world.write_urls(world, server.base_url)` writes the URL list that ingest reads.
"""
