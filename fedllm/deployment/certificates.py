"""The keys and certificates of a federation: its authority (CA), the server's certificate, a key pair for each site."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.common.errors import UserError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

LOCAL = ("127.0.0.1", "localhost")  # names under which the server's own processes reach it
_DAYS = 825  # that a certificate is valid
_EARLIER = datetime.timedelta(hours=1)  # clocks may disagree by this much


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Writes a file that must not exist yet, with this mode from its first byte on. UserError if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise UserError(f"{path} exists, and nothing is overwritten; name another folder") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def write_certificates(folder: Path, hosts: Sequence[str], days: int = _DAYS) -> None:
    """Writes ca.crt, ca.key, server.pem and server.key. hosts: DNS names and addresses under which sites reach the
    server; those of this machine are added. ca.key is needed only to renew the server's certificate."""
    authority = _key()
    issuer = _name("fedllm federation")
    ca = _certificate(issuer, issuer, authority, authority, _authority_uses(), days)
    key = _key()
    server = _certificate(_name("fedllm server"), issuer, key, authority, _server_uses(hosts), days)
    write_new(folder / "ca.crt", _pem(ca))
    write_new(folder / "ca.key", _private_pem(authority), 0o600)
    write_new(folder / "server.pem", _pem(server))
    write_new(folder / "server.key", _private_pem(key), 0o600)


def write_site_key(path: Path, name: str) -> str:
    """Writes a site's private key (mode 0600, as `ssh-keygen -t ecdsa` writes it) and returns its public key's line."""
    from cryptography.hazmat.primitives import serialization as s

    key = _key()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())
    write_new(path, private, 0o600)
    public = key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
    return f"{public.decode()} {name}"


def _key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _name(text: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


Uses = Sequence[tuple["x509.ExtensionType", bool]]


def _authority_uses() -> Uses:
    from cryptography import x509

    return [(x509.BasicConstraints(ca=True, path_length=0), True), (_key_usage("key_cert_sign", "crl_sign"), True)]


def _server_uses(hosts: Sequence[str]) -> Uses:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names = [_host(host) for host in dict.fromkeys([*hosts, *LOCAL])]
    return [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(names), False),
        (_key_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
    ]


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*allowed: str) -> x509.KeyUsage:
    from cryptography import x509

    kinds = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{kind: kind in allowed for kind in kinds})


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: EllipticCurvePrivateKey,
    signer: EllipticCurvePrivateKey,
    uses: Uses,
    days: int,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now - _EARLIER, now + datetime.timedelta(days=days) - _EARLIER))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension, critical in uses:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA384())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
