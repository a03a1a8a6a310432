"""What an object store's refusals mean, in one line each."""

from __future__ import annotations

import datetime
import email.utils
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from training.checkpoint.errors import RemoteError, RemoteUnavailable

_CHAIN = "the environment (AWS_ACCESS_KEY_ID ...), ~/.aws or the role of the instance"
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthorizationHeaderMalformed"}
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "RequestExpired"}
_FORBIDDEN = {"AccessDenied", "403", "AllAccessDisabled", "AccountProblem"}
_SKEWED = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout", "InternalError"}
_AWAY = {"ServiceUnavailable", "503", "500", "502", "504"}


@contextmanager
def translated(where: str, bucket: str) -> Iterator[None]:
    """Turns what boto3 raises inside the block into RemoteError or RemoteUnavailable.

    `where` is the store's address.
    """
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    try:
        yield
    except ClientError as error:
        raise _of_response(error.response, str(error.operation_name), where, bucket) from None
    except HTTPClientError as error:
        raise RemoteUnavailable(f"the object store at {where} cannot be reached ({_short(error)})", _WAITS) from None
    except BotoCoreError as error:
        raise _of_client(error, where) from None


_WAITS = "nothing is lost: it is tried again; check the network and the store if this lasts"


def _of_client(error: Exception, where: str) -> RemoteError | RemoteUnavailable:
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return RemoteError(f"there are no complete AWS credentials for {where}", f"provide them by {_CHAIN}")
    if name in ("ProfileNotFound", "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError"):
        return RemoteError(
            f"the AWS profile for {where} cannot be used: {_short(error)}", "check AWS_PROFILE and ~/.aws"
        )
    if name in ("EndpointConnectionError", "ConnectionClosedError", "ConnectTimeoutError", "ReadTimeoutError"):
        return RemoteUnavailable(f"the object store at {where} cannot be reached ({_short(error)})", _WAITS)
    return RemoteError(f"the object store at {where} cannot be used: {_short(error)}", "check checkpoint.remote")


def _of_response(response: Any, operation: str, where: str, bucket: str) -> RemoteError | RemoteUnavailable:
    code = str(response.get("Error", {}).get("Code", ""))
    metadata = response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    if code in _BUSY | _AWAY or status >= 500 or status == 429:
        return RemoteUnavailable(f"the object store at {where} is busy or in trouble ({code or status})", _WAITS)
    return RemoteError(*_refusal(code, status, operation, where, bucket, metadata))


def _refusal(code: str, status: int, operation: str, where: str, bucket: str, metadata: Any) -> tuple[str, str]:
    """Returns cause and remedy of a refusal that waiting does not cure; the first rule that fits counts."""
    rules = (
        (
            code == "NoSuchBucket",
            f"there is no bucket {bucket} at {where}",
            "create it, or correct checkpoint.remote",
        ),
        (
            code in _SKEWED,
            f"the clock of this machine is {_skew(metadata)}off the clock of the object store at {where}",
            "set the clock (chronyd, or timedatectl set-ntp true); uploads then go on by themselves",
        ),
        (
            code in _WRONG_KEY,
            f"the AWS credentials are not valid at {where} ({code})",
            f"check {_CHAIN}",
        ),
        (code in _EXPIRED, f"the AWS credentials for {where} have expired", f"renew them in {_CHAIN}"),
        (
            code in _FORBIDDEN or status in (401, 403),
            f"the AWS credentials may not {operation} in bucket {bucket} at {where}",
            "allow s3:ListBucket, GetObject, PutObject, DeleteObject and AbortMultipartUpload to this user or role",
        ),
        (
            code in ("PermanentRedirect", "301", "IllegalLocationConstraintException"),
            f"bucket {bucket} lies in another region than the request went to",
            "set AWS_REGION to the region of the bucket",
        ),
        (True, f"the object store at {where} refused {operation}: {code or status}", "check checkpoint.remote"),
    )
    return next((cause, remedy) for applies, cause, remedy in rules if applies)


def _skew(metadata: Any) -> str:
    """Returns "75 minutes " from the Date header of a response, or nothing where there is none."""
    header = metadata.get("HTTPHeaders", {}).get("date")
    if not header:
        return ""
    there = email.utils.parsedate_to_datetime(header)
    minutes = abs((datetime.datetime.now(datetime.timezone.utc) - there).total_seconds()) / 60
    return f"{minutes:,.0f} minutes " if minutes >= 2 else ""


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
