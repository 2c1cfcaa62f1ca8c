"""All errors that Pippin raises on purpose.

    PippinError
    ├── ConfigError              bad flags or configuration file
    ├── ModelError
    │   ├── ModelNotFound        no such directory, file, hub id or served name
    │   ├── ModelInvalid         corrupt or incomplete files
    │   ├── UnsupportedModel     architecture, format or quantisation that no backend runs
    │   └── DownloadError        the hub cannot be reached or refuses
    ├── OutOfMemory              weights or KV cache do not fit
    ├── RequestError             the client's fault, or told to the client
    │   ├── InvalidRequest       400
    │   ├── NotSupported         400, valid elsewhere but not done here
    │   ├── ContextLengthExceeded 400
    │   ├── Unauthorized         401
    │   ├── NotFound             404
    │   │   └── UnknownModel     404, the name is not served
    │   ├── MethodNotAllowed     405
    │   ├── BodyTooLarge         413
    │   ├── QueueFull            429, with Retry-After
    │   ├── RequestTimeout       408
    │   └── EngineUnavailable    503
    ├── EngineError              the engine process failed
    ├── LinkError                between two stages
    │   ├── PeerLost             gone, silent, or not there in time
    │   ├── StageMismatch        the two ends do not belong to one pipeline
    │   ├── ProtocolError        a frame that is not what was agreed
    │   └── ClusterSecretWrong   the other end was given another secret
    ├── ClusterError             the machines that were to share the work
    │   ├── ClusterUnreachable   no Ray there, or it lets us not in
    │   ├── ResourcesMissing     too few nodes have what a rank needs
    │   └── NodeUnfit            a node without Pippin, or with another version of it
    └── PortInUse

Each has a ``code`` (stable, for programs), a message and a ``hint`` (the command or change that
fixes it). The command line prints ``error: … / hint: …``; the server answers
``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

from typing import ClassVar


class PippinError(Exception):
    """Base of the tree. ``str(error)`` is the message; the hint stands beside it."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(PippinError):
    code = "bad_config"
    exit_code = 2


class ModelError(PippinError):
    code = "model_error"


class ModelNotFound(ModelError):
    code = "model_not_found"


class ModelInvalid(ModelError):
    code = "model_invalid"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class DownloadError(ModelError):
    code = "download_failed"


class OutOfMemory(PippinError):
    code = "out_of_memory"


class EngineError(PippinError):
    code = "engine_error"


class LinkError(PippinError):
    code = "link_error"


class PeerLost(LinkError):
    code = "peer_lost"


class StageMismatch(LinkError):
    code = "stage_mismatch"


class ProtocolError(LinkError):
    code = "protocol_error"


class ClusterSecretWrong(LinkError):
    code = "cluster_secret_wrong"


class ClusterError(PippinError):
    code = "cluster_error"


class ClusterUnreachable(ClusterError):
    code = "cluster_unreachable"


class ResourcesMissing(ClusterError):
    code = "resources_missing"


class NodeUnfit(ClusterError):
    code = "node_unfit"


class PortInUse(PippinError):
    code = "port_in_use"


class RequestError(PippinError):
    """An error that ends one request. ``type`` is the OpenAI API's error type."""

    code = "invalid_request"
    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class InvalidRequest(RequestError):
    pass


class NotSupported(RequestError):
    code = "not_supported"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class Unauthorized(RequestError):
    code = "invalid_api_key"
    status = 401
    type = "authentication_error"


class NotFound(RequestError):
    code = "not_found"
    status = 404
    type = "not_found_error"


class UnknownModel(NotFound):
    code = "model_not_found"


class MethodNotAllowed(RequestError):
    """``allowed`` are the methods that the route has."""

    code = "method_not_allowed"
    status = 405

    def __init__(self, message: str, *, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class BodyTooLarge(RequestError):
    code = "body_too_large"
    status = 413


class RequestTimeout(RequestError):
    code = "request_timeout"
    status = 408
    type = "timeout_error"


class QueueFull(RequestError):
    """``retry_after`` is in seconds."""

    code = "queue_full"
    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailable(RequestError):
    code = "engine_unavailable"
    status = 503
    type = "server_error"
