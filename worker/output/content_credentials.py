"""Signs files with Content Credentials (C2PA), by a certificate that the user gives; the extra `c2pa` does the work."""

import io
import json
import wave
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from svdq.pipeline.errors import InputError, how_to_install, reason_of
from svdq.pipeline.media.xmp import VOCABULARY
from svdq.producer.settings import Settings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}


class ContentCredentials:
    """A certificate with its key."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read both files, PEM, the certificate with its chain, and sign a short sound as a check.

        Raises InputError if they are not what C2PA signs with, or the extra is not installed.
        """
        try:
            import c2pa
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        except ImportError as error:
            raise InputError(f"SVDQ_C2PA_CERT needs another package; {how_to_install('c2pa')}.") from error
        self._c2pa = c2pa
        try:
            chain, secret = certificate.read_bytes(), key.read_bytes()
        except OSError as error:
            raise InputError(
                f"{error.filename} cannot be read ({error.strerror}); correct SVDQ_C2PA_CERT and _KEY."
            ) from None
        try:
            self._algorithm = getattr(c2pa.C2paSigningAlg, _algorithm_for(load_pem_private_key(secret, None)))
            self._chain, self._secret = chain, secret
            self._sign(io.BytesIO(_short_sound()), io.BytesIO(), "audio/wav", "trainedAlgorithmicMedia")
        except (ValueError, TypeError, c2pa.C2paError) as error:  # TypeError: of a key with a passphrase
            raise InputError(
                f"{str(certificate)!r} with {str(key)!r} cannot sign files ({reason_of(error)}); C2PA asks for a chain "
                "of PEM certificates, the signer's first and not self-signed, and its key without a passphrase."
            ) from None

    @classmethod
    def of(cls, settings: Settings) -> "ContentCredentials | None":
        """Open what the settings name; None if they name nothing."""
        match settings.c2pa_cert, settings.c2pa_key:
            case None, None:
                return None
            case Path() as certificate, Path() as key:
                return cls(certificate, key)
            case _:
                raise InputError("SVDQ_C2PA_CERT and SVDQ_C2PA_KEY belong together; give both or neither.")

    def sign(self, path: Path, source_type: str) -> None:
        """Sign a file, or each file of a folder, in place; raises OSError for a condition such as a full disk."""
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            signed = file.with_name(f"{file.stem}.signed{file.suffix}")
            with file.open("rb") as source, signed.open("w+b") as target:
                self._sign(source, target, file.suffix[1:], source_type)
            signed.replace(file)

    def _sign(self, source: io.IOBase, target: io.IOBase, kind: str, source_type: str) -> None:
        c2pa = self._c2pa
        created = {"action": "c2pa.created", "digitalSourceType": f"{VOCABULARY}{source_type}"}
        manifest = {
            "claim_generator_info": [{"name": "svdq", "version": version("svdq")}],
            "assertions": [{"label": "c2pa.actions.v2", "data": {"actions": [created]}}],
        }
        # A signer cannot be used twice. A preview would be as large as the frames of a short gif.
        signer = c2pa.Signer.from_info(c2pa.C2paSignerInfo(self._algorithm, self._chain, self._secret, None))
        settings = c2pa.Settings.from_dict({"builder": {"thumbnail": {"enabled": False}}})
        with c2pa.Context(settings) as context, c2pa.Builder(json.dumps(manifest), context) as builder:
            builder.sign(signer, kind, source, target)


def _algorithm_for(key: "PrivateKeyTypes") -> str:
    """Return C2PA's name of the algorithm for a key; raises ValueError for one that it does not allow."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    match key:
        case ed25519.Ed25519PrivateKey():
            return "ED25519"
        case rsa.RSAPrivateKey():
            return "PS256"
        case ec.EllipticCurvePrivateKey() if key.curve.name in _CURVES:
            return _CURVES[key.curve.name]
    raise ValueError("a key of P-256, P-384, P-521, Ed25519 or RSA is needed")


def _short_sound() -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(16))
    return buffer.getvalue()
