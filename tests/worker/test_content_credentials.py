"""Files that are signed with the certificate of a user, as C2PA's own library reads them."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import c2pa
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from svdq.pipeline.errors import InputError
from svdq.pipeline.media.mp4 import read_mp4
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.video import write_video
from svdq.pipeline.media.xmp import Mark
from svdq.producer.settings import Settings
from svdq.worker.output.content_credentials import ContentCredentials
from tests.conftest import Cli

MARK = Mark(source_type="trainedAlgorithmicMedia", tool="svdq 1.2", model="wan2.2")
FRAMES = np.random.default_rng(0).integers(0, 256, (3, 64, 96, 3), np.uint8)
SOUND = Sound(pcm=np.zeros((8000, 2), np.int16), rate=8000)


def name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(each, text) for each in (NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME)])


def write_certificate(folder: Path, key: Any) -> Settings:
    """Write a chain of two certificates and a key, and return settings with them."""
    root, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)

    def certificate(subject: str, public: Any, *, is_root: bool) -> bytes:
        usage = x509.KeyUsage(True, False, False, False, False, is_root, is_root, False, False)
        builder = x509.CertificateBuilder(name("root"), name(subject), public, x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(is_root, None), critical=True)
        builder = builder.add_extension(usage, critical=True)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key())
        builder = builder.add_extension(issuer, critical=False)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        if not is_root:
            purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
            builder = builder.add_extension(purpose, critical=False)
        return builder.sign(root, hashes.SHA256()).public_bytes(Encoding.PEM)

    chain = certificate("leaf", key.public_key(), is_root=False) + certificate("root", root.public_key(), is_root=True)
    cert_file, key_file = folder / "chain.pem", folder / "key.pem"
    cert_file.write_bytes(chain)
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Settings(home=folder, c2pa_cert=cert_file, c2pa_key=key_file)


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP256R1()),
        ed25519.Ed25519PrivateKey.generate(),
        rsa.generate_private_key(65537, 2048),
    ],
    ids=["P-256", "Ed25519", "RSA"],
)
def test_signed_files_are_valid_and_show_the_same(tmp_path: Path, key: Any) -> None:
    credentials = ContentCredentials.of(write_certificate(tmp_path, key))
    assert credentials is not None
    for kind in ("mp4", "gif", "webp", "png", "wav"):
        path = tmp_path / f"a.{kind}"
        write_video(FRAMES, path, kind, 7, "{}", sound=SOUND, mark=MARK)
        before = read_mp4(path, (96, 64)) if kind == "mp4" else None
        credentials.sign(path, MARK.source_type)
        for file in [*path.iterdir()] if path.is_dir() else [path]:
            found = json.loads(c2pa.Reader(str(file)).json())
            # Of a root that nobody knows, which is all that is said against it.
            assert (found["validation_state"], [each["code"] for each in found["validation_status"]]) == (
                "Valid",
                ["signingCredential.untrusted"],
            )
            [manifest] = found["manifests"].values()
            [actions] = [each for each in manifest["assertions"] if each["label"].startswith("c2pa.actions")]
            assert actions["data"]["actions"][0]["digitalSourceType"].endswith("/trainedAlgorithmicMedia")
            assert "thumbnail" not in manifest
        if before is not None:
            assert (read_mp4(path, (96, 64)) == before).all()
    assert len([*(tmp_path / "a.png").iterdir()]) == 3


def test_files_that_cannot_sign_are_refused_at_the_start(svdq: Cli, tmp_path: Path) -> None:
    settings = write_certificate(tmp_path, ec.generate_private_key(ec.SECP256R1()))
    other = tmp_path / "other"
    other.mkdir()
    others = write_certificate(other, ec.generate_private_key(ec.SECP256R1()))
    text = tmp_path / "text.pem"
    text.write_text("none")
    for wrong, sentence in [
        ({"c2pa_key": None}, "belong together"),
        ({"c2pa_key": others.c2pa_key}, "cannot sign files"),
        ({"c2pa_key": text}, "cannot sign files"),
        ({"c2pa_cert": text}, "cannot sign files"),
        ({"c2pa_cert": tmp_path / "none"}, "cannot be read (No such file or directory)"),
    ]:
        with pytest.raises(InputError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
            ContentCredentials.of(settings.model_copy(update=wrong))
    done = svdq("worker", "--burst", SVDQ_C2PA_CERT=str(text), SVDQ_C2PA_KEY=str(text))
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
