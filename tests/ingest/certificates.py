"""An authority of the test's own, and certificates that are good, expired, for another host, or signed by nobody."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Authority:
    """`file` is its own certificate, for SSL_CERT_FILE."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
        builder = _builder(self._name, self._name, self._key, self._key, NOW + DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        uses = dict.fromkeys(("digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
                              "key_agreement", "encipher_only", "decipher_only"), False)  # fmt: skip
        builder = builder.add_extension(x509.KeyUsage(**uses, key_cert_sign=True, crl_sign=True), critical=True)
        self.file = folder / "authority.pem"
        self.file.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def context(self, kind: str) -> ssl.SSLContext:
        """What a server needs; `kind` is good, expired, other_host or self_signed."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, kind)])
        until = NOW - DAY if kind == "expired" else NOW + DAY
        issuer, signer = (name, key) if kind == "self_signed" else (self._name, self._key)
        builder = _builder(name, issuer, key, signer, until)
        address = ipaddress.ip_address("127.0.0.9" if kind == "other_host" else "127.0.0.1")
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(address)]), critical=False)
        signed = builder.sign(signer, hashes.SHA256())
        path = self._folder / f"{kind}.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + signed.public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context


def _builder(
    name: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    until: datetime.datetime,
) -> x509.CertificateBuilder:
    """With the identifiers of keys that Python 3.13 insists on (RFC 5280)."""
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signers = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(own, critical=False).add_extension(signers, critical=False)
    return builder.not_valid_before(NOW - 10 * DAY).not_valid_after(until)
