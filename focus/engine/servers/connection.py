"""One server over HTTP: the calls of SGLang's API that a run needs, and how each can fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from focus.engine.protocol import EngineError


class Refused(EngineError):
    """Nobody listens at the address."""


class Interrupted(EngineError):
    """The answer did not come, not whole, or not in time."""


class Busy(EngineError):
    """The server is alive and has no room now."""


class Rejected(EngineError):
    """The server says that the call cannot be served as it is."""


_BUSY = (408, 429, 503)


class Connection:
    """The API of one server or router.

    Args:
      url: without a path.
      session: shared by all connections of a fleet.
      timeout_s: seconds for a call, where it names none.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout_s: float):
        self.url = url
        self._session = session
        self._timeout_s = timeout_s
        self._get = ""

    async def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None
    ) -> Any:
        """Sends a request and reads its answer.

        Args:
          method: "GET", "POST" or "DELETE".
          path: begins with a slash.
          body: sent as JSON; None sends none.
          timeout_s: seconds until the answer must be there; None for the connection's own,
            infinity for no limit.

        Returns:
          Parsed JSON, or None if the answer is not JSON and need not be (empty or plain text).

        Raises:
          EngineError: one of the classes above, by what happened.
        """
        seconds = self._timeout_s if timeout_s is None else timeout_s
        what = f"{method} {self.url}{path}"
        try:
            async with asyncio.timeout(None if seconds == float("inf") else seconds):
                async with self._session.request(method, self.url + path, json=body) as answer:
                    status, kind, text = answer.status, answer.content_type, await answer.read()
        except aiohttp.ClientConnectorError as error:
            raise Refused(f"{what}: {error}") from error
        except TimeoutError as error:
            raise Interrupted(f"{what}: no answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Interrupted(f"{what}: {type(error).__name__}: {error}") from error
        return _parsed(what, status, kind, text)

    async def generate(self, payload: dict[str, Any]) -> Any:
        """One generation; it may take as long as it takes."""
        return await self.call("POST", "/generate", payload, timeout_s=float("inf"))

    async def model_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the server says of its model, `weight_version` included."""
        return await self._info("model_info", timeout_s)

    async def server_info(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """How the server was started."""
        return await self._info("server_info", timeout_s)

    async def generates(self, *, timeout_s: float | None = None) -> None:
        """Lets the server sample one token; fails if it cannot."""
        await self.call("GET", "/health_generate", timeout_s=timeout_s)

    async def pause(self, mode: str) -> None:
        """Stops sampling; `mode` is "abort", "retract" or "in_place"."""
        await self.call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Ends a pause."""
        await self.call("POST", "/continue_generation", {})

    async def load(self, path: str, version: str, *, timeout_s: float) -> None:
        """Loads weights from a directory that the server sees under the same path.

        Raises:
          EngineError: it could not; its weights may now be anything.
        """
        answer = await self.call(
            "POST",
            "/update_weights_from_disk",
            {"model_path": path, "weight_version": version, "flush_cache": True},
            timeout_s=timeout_s,
        )
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise Rejected(f"{self.url} did not load {path!r}: {answer}")

    async def adapters(self, *, timeout_s: float | None = None) -> dict[str, str]:
        """Directories of the adapters that it has loaded, by name."""
        answer = await self.call("GET", "/v1/models", timeout_s=timeout_s)
        try:
            entries = [entry for entry in answer["data"] if entry.get("parent") is not None]
            return {entry["id"]: entry["root"] for entry in entries}
        except (KeyError, TypeError, AttributeError) as error:
            raise Interrupted(f"GET {self.url}/v1/models: {error!r} in {answer}") from error

    async def load_adapter(self, name: str, path: str, *, timeout_s: float) -> None:
        """Loads an adapter from a directory in the layout of PEFT; requests may go on meanwhile.

        Raises:
          EngineError: it could not, or has one of that name.
        """
        body = {"lora_name": name, "lora_path": path}
        answer = await self.call("POST", "/load_lora_adapter", body, timeout_s=timeout_s)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise Rejected(f"{self.url} did not load {path!r}: {answer}")

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Takes an adapter away; the answer comes after its last request, and no load before it."""
        body = {"lora_name": name}
        await self.call("POST", "/unload_lora_adapter", body, timeout_s=timeout_s)

    async def abort(self, rid: str | None) -> None:
        """Aborts a request, or all if `rid` is None; one that is unknown is no error."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self.call("POST", "/abort_request", body)

    async def flush(self) -> None:
        """Empties the cache of prefixes."""
        await self.call("POST", "/flush_cache", {})

    async def _info(self, name: str, timeout_s: float | None) -> dict[str, Any]:
        path = f"/{self._get}{name}"
        try:
            info = await self.call("GET", path, timeout_s=timeout_s)
        except Rejected:
            if self._get:
                raise
            self._get = "get_"  # what older servers put before the name
            return await self._info(name, timeout_s)
        if not isinstance(info, dict):
            raise Interrupted(f"GET {self.url}{path}: not a JSON object")
        return info


def _parsed(what: str, status: int, kind: str, text: bytes) -> Any:
    try:
        body = json.loads(text) if kind == "application/json" else None
    except ValueError as error:
        raise Interrupted(f"{what}: the answer is not valid JSON ({error})") from error
    if status < 400:
        return body
    said = body if body is not None else text[:500].decode(errors="replace")
    if isinstance(said, dict):
        said = said.get("error", said)
        said = said.get("message", said) if isinstance(said, dict) else said
    message = f"{what}: {status} {said}"
    if status in _BUSY:
        raise Busy(message)
    raise (Interrupted if status >= 500 else Rejected)(message)
