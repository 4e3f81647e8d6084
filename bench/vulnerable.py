"""Whether a package that requirements.lock pins has a known vulnerability, by pip-audit in a side environment.

    python -m bench.vulnerable

Ends with 1 where one is known. Where pip-audit cannot be had, or nobody can be asked, it says so and ends with 0: a check must
also pass without a network.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.peers import ROOT, peer_python

LOCK = ROOT / "requirements.lock"
CANARY = (
    "django==3.2"  # full of known holes and none of ours: mirrors of the registry may answer without knowing of any
)
PATIENCE_S = 300


def main() -> int:
    try:
        found = asked(peer_python("audit"), LOCK)
    except (SystemExit, subprocess.SubprocessError, ValueError) as error:
        print(f"not audited: {' '.join(str(error).split())[-300:]}")
        return 0
    known = [line for package in found for line in described(package)]
    print("\n".join(known) or f"{len(found)} packages, no known vulnerability")
    return bool(known)


def asked(python: Path, lock: Path) -> list[dict[str, Any]]:
    """What pip-audit says of each package of a lock file.

    Raises:
        ValueError: it could not ask; with its last words.
        subprocess.TimeoutExpired: nobody answered in time.
    """
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.json"
        words = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--output", str(report)]
        pinned = Path(place) / "pinned.txt"
        pinned.write_text(f"{lock.read_text()}\n{CANARY}\n")
        command = [str(python), "-m", "pip_audit", "--requirement", str(pinned), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if not report.exists():
            raise ValueError((done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1])
        packages: list[dict[str, Any]] = json.loads(report.read_text())["dependencies"]
    canary = CANARY.partition("==")[0]
    if not any(package["name"] == canary and package.get("vulns") for package in packages):
        raise ValueError(f"whoever answers for the registry knows of no vulnerability, not even in {CANARY}")
    return [package for package in packages if package["name"] != canary]


def described(package: dict[str, Any]) -> list[str]:
    """One line a known vulnerability of the package."""
    name = f"{package['name']} {package.get('version', '')}"
    return [
        f"{name}: {known['id']}, mended in {', '.join(known['fix_versions']) or 'no version yet'}"
        for known in package.get("vulns", [])
    ]


if __name__ == "__main__":
    sys.exit(main())
