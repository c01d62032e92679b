"""Makes a certificate authority, the server's certificate, and a key pair for every node."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedhb.errors import InputError
from fedhb.files import write_atomically

CA_YEARS, SERVER_DAYS = 10, 397
"""How long certificates are valid: the server's no longer than clients commonly accept."""

SERVER_NAME = "fedhb federation server"
"""The common name. Nodes compare the alternative names alone, which may be longer."""


def make_authority(folder: Path) -> None:
    """Write ca.crt and ca.key.

    The key allows to speak as the server: it stays with the server's owner.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedhb federation CA")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key.public_key(), CA_YEARS * 365)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_secret(folder / "ca.key", _pem(key))
    write_atomically(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))


def make_server(folder: Path, hosts: Sequence[str]) -> None:
    """Write server.pem and server.key for these names, signed by the folder's authority."""
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        _builder(name, authority.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([alternative(host) for host in hosts]), critical=False
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA384())
    )
    write_secret(folder / "server.key", _pem(key))
    write_atomically(folder / "server.pem", certificate.public_bytes(serialization.Encoding.PEM))


def make_node_key(path: Path) -> None:
    """Write a node's key pair, PATH and PATH.pub: ECDSA on P-384 in OpenSSH's formats."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    write_secret(path, private)
    write_atomically(path.with_name(path.name + ".pub"), public + b"\n")


def write_secret(path: Path, content: bytes) -> None:
    """Write a key that only its owner may read, whole or not at all."""
    if path.exists():
        raise InputError(f"{path} exists already: a key is never overwritten; remove it first")
    write_atomically(path, content, private=True)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    begin = datetime.now(UTC) - timedelta(minutes=5)  # clocks differ
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=days))
    )


def alternative(host: str) -> x509.GeneralName:
    """Return a name or an address as a certificate holds it."""
    if not host.strip():
        raise InputError(
            f"host {host!r} is empty: give a name or an address of the server (--host), or leave "
            "it out for 127.0.0.1"
        )
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise InputError(f"host {host!r} is neither an address nor a plain ASCII name") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
