"""The authority's certificates, and the nodes' keys."""

from __future__ import annotations

import ipaddress
import tomllib

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from deploying import deploy

from fedhb.errors import InputError
from fedhb.flower.deploy import certificates


def test_the_certificate_is_signed_and_names_the_server(folder):
    made = folder / "certificates"
    authority = x509.load_pem_x509_certificate((made / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((made / "server.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(a) for a in ("192.0.2.7", "127.0.0.1")
    ]
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key = serialization.load_pem_private_key((made / "server.key").read_bytes(), None)
    assert key.public_key() == server.public_key()


def test_a_servers_name_may_be_long(tmp_path):
    """A certificate's common name has at most 64 characters, and nodes do not look at it."""
    host = "internal-federation-server-0123456789abcdef.elb.eu-central-1.amazonaws.com"
    deploy("init", tmp_path / "fed", "--nodes", 1, "--host", host)
    server = x509.load_pem_x509_certificate(
        (tmp_path / "fed" / "certificates" / "server.pem").read_bytes()
    )
    assert host in server.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ).value.get_values_for_type(x509.DNSName)
    connection = tomllib.loads((tmp_path / "fed" / "flower" / "config.toml").read_text())[
        "superlink"
    ]["fedhb"]
    assert connection["address"] == f"{host}:8000"


def test_keys_are_different_and_their_owners_alone(folder):
    secrets = [
        folder / "certificates" / "ca.key",
        folder / "certificates" / "server.key",
        *sorted((folder / "keys").glob("node-?")),
    ]
    assert len(secrets) == 4 and len({path.read_bytes() for path in secrets}) == 4
    assert {oct(path.stat().st_mode)[-3:] for path in secrets} == {"600"}
    for path in secrets[2:]:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"
        public = path.with_name(path.name + ".pub").read_bytes()
        assert serialization.load_ssh_public_key(public) == key.public_key()
    with pytest.raises(InputError, match=r"key.*overwritten"):
        certificates.make_node_key(secrets[2])
