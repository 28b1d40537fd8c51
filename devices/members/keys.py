"""The keys of devices: Ed25519 for signatures and X25519 for sealing, both made from one seed of 32 bytes.

Only the device that something is sealed for can read it. Two devices that know each other's sealing keys can make the
same secret word (`DeviceKey.word_with`), which no other device can make; passwords at a broker are such words.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from edge_run.base.errors import NotTrusted
from edge_run.base.extras import MESH, need

KEY_BYTES, SIGNATURE_BYTES, NODE_LETTERS = 32, 64, 16
SEAL_BYTES = KEY_BYTES + 16  # what sealing adds: a key for once, and a tag
_ED25519 = "cryptography.hazmat.primitives.asymmetric.ed25519"
_X25519 = "cryptography.hazmat.primitives.asymmetric.x25519"
_CIPHER = "cryptography.hazmat.primitives.ciphers.aead"
_NO_NONCE = bytes(12)  # each sealing has a key of its own


def to_text(data: bytes) -> str:
    """Return `data` as documents of JSON have it: in base64."""
    return base64.b64encode(data).decode()


def from_text(value: object, length: int = KEY_BYTES) -> bytes:
    """Return the `length` bytes that `value`, of a document, stands for. Raises ValueError where it does not."""
    found = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    if len(found) != length:
        raise ValueError(f"not {length} bytes")
    return found


class DeviceKey:
    """The key that a device keeps.

    node: the id that follows from it.
    seal_key: what others seal with for it.
    """

    def __init__(self, seed: bytes) -> None:
        """`seed` (32 bytes) is the secret that both keys are made from."""
        self._signer = need(_ED25519, MESH).Ed25519PrivateKey.from_private_bytes(seed)
        opener = hashlib.sha256(b"edge-run seal\0" + seed).digest()
        self._opener = need(_X25519, MESH).X25519PrivateKey.from_private_bytes(opener)
        self.public_key: bytes = self._signer.public_key().public_bytes_raw()
        self.seal_key: bytes = self._opener.public_key().public_bytes_raw()
        self.node = node_of(self.public_key)

    def sign(self, data: bytes) -> bytes:
        """Return the signature (64 bytes) of `data`."""
        return bytes(self._signer.sign(data))

    def unseal(self, sealed: bytes, purpose: bytes) -> bytes:
        """Return what was sealed for this device. Raises NotTrusted where it was sealed for another, or changed."""
        exceptions = need("cryptography.exceptions", MESH)
        key = _mixed(self._opener, sealed[:KEY_BYTES], purpose + sealed[:KEY_BYTES] + self.seal_key)
        try:
            return bytes(_cipher(key).decrypt(_NO_NONCE, sealed[KEY_BYTES:], purpose))
        except (exceptions.InvalidTag, ValueError) as error:
            raise NotTrusted("what was sealed for this device cannot be opened by its key") from error

    def word_with(self, seal_key: bytes, purpose: bytes) -> str:
        """Return the word of 32 hexadecimal digits that only this device and the holder of `seal_key` can make."""
        both = b"".join(sorted((self.seal_key, seal_key)))
        return _mixed(self._opener, seal_key, purpose + both).hex()[:32]


def seal(seal_key: bytes, data: bytes, purpose: bytes) -> bytes:
    """Return `data` so that only the holder of `seal_key` can read it, and only for `purpose`. Raises NotTrusted."""
    once = need(_X25519, MESH).X25519PrivateKey.generate()
    own = once.public_key().public_bytes_raw()
    return bytes(own + _cipher(_mixed(once, seal_key, purpose + own + seal_key)).encrypt(_NO_NONCE, data, purpose))


def node_of(public_key: bytes) -> str:
    """Return the id of the node that has `public_key`."""
    digest = hashlib.sha256(b"edge-run node\0" + public_key).digest()
    return base64.b32encode(digest).decode().lower()[:NODE_LETTERS]


def is_signed(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` is that of `data` by the holder of `public_key`."""
    exceptions = need("cryptography.exceptions", MESH)
    try:
        need(_ED25519, MESH).Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (exceptions.InvalidSignature, ValueError):
        return False
    return True


def _cipher(key: bytes) -> Any:
    return need(_CIPHER, MESH).ChaCha20Poly1305(key)


def _mixed(private: Any, public: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes made from a Diffie-Hellman exchange; a public key that cannot be raises NotTrusted."""
    try:
        shared = private.exchange(need(_X25519, MESH).X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise NotTrusted("a sealing key of a device is none") from error
    return hmac.digest(shared, b"edge-run word\0" + purpose, hashlib.sha256)
