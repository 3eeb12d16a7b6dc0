"""A folder with what an operator of a site has: site.yaml, a certificate, a key and data."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import yaml

# Of an authority (CA) and of a server, valid from 2026 to 2126; no private key of them is kept.
AUTHORITY = """-----BEGIN CERTIFICATE-----
MIIBpzCCAU2gAwIBAgIUWxa6SfQQXGBy7U7gUNBFl94SxHEwCgYIKoZIzj0EAwIw
IDEeMBwGA1UEAwwVZmVkbGxtIHRlc3QgYXV0aG9yaXR5MCAXDTI2MTEyMjIwNDc1
MVoYDzIxMjYxMDI5MjA0NzUxWjAgMR4wHAYDVQQDDBVmZWRsbG0gdGVzdCBhdXRo
b3JpdHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAASK57hFmQ1f4sr7ei6fOMjc
/Zqy+lys1NmxHTmCYtBnwHQKSXTTs+iBcFsvHrCSsBtay+iZBW/hguFiOoinKlUO
o2MwYTAdBgNVHQ4EFgQUhp+dBtrcYof408UBzXKOn7J2YwowHwYDVR0jBBgwFoAU
hp+dBtrcYof408UBzXKOn7J2YwowDwYDVR0TAQH/BAUwAwEB/zAOBgNVHQ8BAf8E
BAMCAgQwCgYIKoZIzj0EAwIDSAAwRQIhANU07YQaeiXr4rQ2Dt+OrknydKycxTul
V4GnPCDoj0k/AiAgOzOQiFlH0cd+nwl5uUoBGxkde+rAYkXw/Cx2Gjvhdw==
-----END CERTIFICATE-----
"""
SERVER = """-----BEGIN CERTIFICATE-----
MIIBjzCCATSgAwIBAgIUR5z5R1GL6YjEttTAFI3ppbIBwf8wCgYIKoZIzj0EAwIw
HTEbMBkGA1UEAwwSZmVkbGxtIHRlc3Qgc2VydmVyMCAXDTI2MTEyMjIwNDc1MVoY
DzIxMjYxMDI5MjA0NzUxWjAdMRswGQYDVQQDDBJmZWRsbG0gdGVzdCBzZXJ2ZXIw
WTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAQcORcwaiyRTh7vryteI3B7ah/LGq4y
py5BXSDTNjLyTW2bWUd/Zi3uki5HVBv0HdcYcKIKd+TXie1m6kWO4RqVo1AwTjAd
BgNVHQ4EFgQU+54WP3fNLqq1I+eQXGcWah2/PN4wHwYDVR0jBBgwFoAU+54WP3fN
Lqq1I+eQXGcWah2/PN4wDAYDVR0TAQH/BAIwADAKBggqhkjOPQQDAgNJADBGAiEA
lu0B81ZvTT6/+wlSMMSbyfUHlymkyEIVjRZSJOncbbgCIQCFcde6Wi42BR3Vp9bh
+oFEHL5ZUkbGChbhTcG3znTrMQ==
-----END CERTIFICATE-----
"""


def private_key(kind: bytes = b"ecdsa-sha2-nistp384", cipher: bytes = b"none", kdf: bytes = b"none") -> str:
    """What ssh-keygen writes, as far as it is looked at; no key is in it."""
    fields = [cipher, kdf, b"", kind]
    body = b"openssh-key-v1\0" + b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    text = base64.encodebytes(body).decode()
    return f"-----BEGIN OPENSSH PRIVATE KEY-----\n{text}-----END OPENSSH PRIVATE KEY-----\n"


def write_site(folder: Path, **changes: Any) -> Path:
    """site.yaml and its files. changes: keys of site.yaml; a key that is "absent" is left out."""
    (folder / "ca.crt").write_text(AUTHORITY)
    key = folder / "site.key"
    key.write_text(private_key())
    key.chmod(0o600)
    for name in ("train", "validation"):
        (folder / f"{name}.csv").write_text("text,label\nthe cat sat,0\n")
    values = {
        "name": "hospital-a", "server": "10.0.0.5:18000", "certificate": "ca.crt", "key": "site.key",
        "train": "train.csv", "validation": "validation.csv", **changes,
    }  # fmt: skip
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in values.items() if value != "absent"}))
    return path
