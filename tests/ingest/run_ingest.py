"""Runs `ingest` with settings from the command line (a JSON object), for tests that kill it."""

import json
import sys

from ingest import fetch
from ingest.config import IngestConfig

if __name__ == "__main__":
    print(json.dumps(fetch.run(IngestConfig(**json.loads(sys.argv[1])))))
