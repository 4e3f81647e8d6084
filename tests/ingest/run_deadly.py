"""Runs `ingest` with the settings of a JSON object, with codecs that crash or never end on marked pictures."""

import json
import sys

from ingest import fetch
from ingest.config import IngestConfig

if __name__ == "__main__":
    fetch.WARM = (*fetch.WARM, "tests.ingest.deadly")
    print(json.dumps(fetch.run(IngestConfig(**json.loads(sys.argv[1])))))
