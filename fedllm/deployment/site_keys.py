"""Checks of a site's certificate and private key, before anything connects. Needs the standard library alone."""

from __future__ import annotations

import base64
import binascii
import os
import re
import ssl
import time
from pathlib import Path

from fedllm.common.errors import UserError

_MADE = "make one with: ssh-keygen -t ecdsa -b 384 -N '' -f site.key"
_PRIVATE = re.compile(r"-----BEGIN ((?:OPENSSH |EC |ENCRYPTED )?PRIVATE KEY)-----\s(.*?)-----END", re.DOTALL)


def require_certificate(path: Path) -> None:
    """Raises UserError unless the file has the certificate of an authority (CA) that is valid now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise UserError(f"{path}: found no certificate, expected one in PEM, -----BEGIN CERTIFICATE-----") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    found = context.get_ca_certs()
    if not found:
        raise UserError(
            f"{path}: found a certificate of one machine, expected that of the authority, the federation's ca.crt"
        )
    now = time.time()
    for certificate in found:
        first, last = str(certificate["notBefore"]), str(certificate["notAfter"])
        if now > ssl.cert_time_to_seconds(last):
            raise UserError(f"{path}: the certificate expired on {last}; ask the server's operator for a new one")
        if now < ssl.cert_time_to_seconds(first):
            raise UserError(f"{path}: the certificate is valid from {first}; check this machine's clock")


def require_private_key(path: Path) -> None:
    """Raises UserError unless the file has an ECDSA private key without passphrase that only its owner may read."""
    try:
        mode, text = path.stat().st_mode & 0o777, path.read_text(encoding="ascii")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {_MADE}") from None
    except UnicodeDecodeError:
        text = ""
    if text.startswith(("ssh-", "ecdsa-")) or "BEGIN PUBLIC KEY" in text:
        raise UserError(f"{path}: found a public key, expected the private one, without .pub")
    if not (found := _PRIVATE.search(text)):
        raise UserError(f"{path}: found no private key, expected one that ssh-keygen -t ecdsa wrote")
    if os.name == "posix" and mode & 0o077:
        raise UserError(f"{path}: others may read it (mode {mode:04o}); type: chmod 600 {path}")
    kind, body = found.groups()
    try:
        content = base64.b64decode(body) if kind.startswith("OPENSSH") else b"none ecdsa-sha2-"
    except (binascii.Error, ValueError):
        content = b""
    if kind.startswith("ENCRYPTED") or "Proc-Type: 4,ENCRYPTED" in body or b"bcrypt" in content[:64]:
        raise UserError(f"{path}: the key has a passphrase, which nobody can type for a service; {_MADE}")
    if b"ecdsa-sha2-" not in content:
        raise UserError(f"{path}: found a key that is not ECDSA, as Flower needs it; {_MADE}")
