"""Takes passwords and signatures out of text that is kept or shown. Secrets belong in the environment; some come in URLs."""

from __future__ import annotations

import logging
import re
from typing import Any

_PASSWORD = re.compile(r"(?<=://)([^\s/:@]*):[^\s/@]+@")
_SIGNED = re.compile(
    r"(?i)([?&;](?:x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|awsaccesskeyid|sig|signature|"
    r"token|access_token|api_?key|key|secret|password)=)[^&;\\\s'\"]+"
)


def redact(text: str) -> str:
    """`text` with `***` for the password of every URL in it and for parameters that sign or open it."""
    return _SIGNED.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def redacted(value: Any) -> Any:
    """A setting, or a list of them, redacted."""
    if isinstance(value, str):
        return redact(value)
    return type(value)(map(redacted, value)) if isinstance(value, (list, tuple)) else value


class Formatter(logging.Formatter):
    """Redacts every line of the log, whoever wrote it."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
