"""What errors of TLS mean to the people who run agents."""

from __future__ import annotations

import ssl
from typing import Final

from allreduced.core.channel import CertificateError
from allreduced.core.errors import AccessError, ProtocolError

SAME_MODE: Final = 'set security.mode = "mtls" on all nodes, or on none'
"""What mends an agent with TLS that meets one without."""

_EXPIRED, _NOT_YET = 10, 9
"""OpenSSL's results of verification: X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID."""
_UNKNOWN = frozenset(
    {
        2,  # X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT
        18,  # X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT
        19,  # X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN
        20,  # X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY
        21,  # X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE
    }
)
"""Those of a certificate that no known authority signed."""

_ALERTS: Final = {
    "CERTIFICATE_EXPIRED": "it has expired",
    "UNKNOWN_CA": "the peer does not know the authority that signed it",
    "BAD_CERTIFICATE": "it is malformed, or by the peer's clock not valid yet",
    "UNSUPPORTED_CERTIFICATE": "it is not made for agents",
    "CERTIFICATE_REVOKED": "it is revoked",
    "CERTIFICATE_UNKNOWN": "the peer does not say why",
    "CERTIFICATE_REQUIRED": "there is none",
    "DECRYPT_ERROR": "key and certificate do not belong together",
}
_NEW = "give the node a new one: allreduced certs node --force NAME"
_AUTHORITY = "the certificates of all nodes must be signed by authorities that are in security.ca everywhere"
_CLOCKS = "compare the clocks of both machines"
_HINTS: Final = {"CERTIFICATE_EXPIRED": _NEW, "UNKNOWN_CA": _AUTHORITY, "BAD_CERTIFICATE": _CLOCKS}


def refusal(error: ssl.SSLError) -> AccessError | ConnectionError:
    """Return what an error of TLS means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _not_accepted(error)
    if isinstance(error, ssl.SSLEOFError):
        return ConnectionResetError("the connection was closed during the handshake of TLS")
    reason = str(error.reason or error)
    _, _, alert = reason.partition("ALERT_")
    if alert in _ALERTS:
        text = f"the peer does not accept this agent's certificate: {_ALERTS[alert]}"
        return CertificateError(text, hint=_HINTS.get(alert, ""))
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return CertificateError("the peer has no certificate, this agent asks for one", hint=SAME_MODE)
    if alert == "PROTOCOL_VERSION" or reason in ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL"):
        return CertificateError("the peer does not speak TLS 1.3, this agent does", hint=SAME_MODE)
    return ProtocolError(f"the other side does not speak TLS as an agent does: {reason.lower().replace('_', ' ')}")


def _not_accepted(error: ssl.SSLCertVerificationError) -> CertificateError:
    if error.verify_code == _EXPIRED:
        return CertificateError("the peer's certificate has expired", hint=_NEW)
    if error.verify_code == _NOT_YET:
        return CertificateError("the peer's certificate is not valid yet", hint=_CLOCKS)
    if error.verify_code in _UNKNOWN:
        text = f"the peer's certificate is not signed by an authority of security.ca ({error.verify_message})"
        return CertificateError(text, hint=_AUTHORITY)
    return CertificateError(f"the peer's certificate is not accepted: {error.verify_message}", hint=_NEW)
